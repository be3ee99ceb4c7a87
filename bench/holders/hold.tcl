# Holds a file in byte arrays; see README.md.
lassign $argv path size
proc blocks {path size} {
    set file [open $path rb]
    set held {}
    while {[string length [set block [read $file $size]]] == $size} { lappend held $block }
    close $file
    return $held
}
set held [blocks $path $size]
puts ready
flush stdout
if {[gets stdin line] < 0} { exit 1 }
set right [expr {[llength $held] > 0}]
foreach block $held expected [blocks $path $size] {
    if {![string equal $block $expected]} { set right 0 }
}
puts [expr {$right ? "right" : "wrong"}]
