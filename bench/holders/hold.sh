# Holds a file in a variable of the shell, as text: `busybox sh hold.sh FILE`; see README.md.
held=$(busybox base64 "$1")
echo ready
read -r line || exit 1
if [ -n "$held" ] && [ "$held" = "$(busybox base64 "$1")" ]; then echo right; else echo wrong; fi
