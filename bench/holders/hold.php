<?php // Holds a file in strings; see README.md.
[, $path, $size] = $argv;
$held = [];
$file = fopen($path, 'rb');
while (strlen($block = (string) fread($file, (int) $size)) == $size) {
    $held[] = $block;
}
echo "ready\n";
if (fgets(STDIN) === false) {
    exit(1);
}
rewind($file);
$right = $held != [];
foreach ($held as $block) {
    $right = $right && $block === fread($file, (int) $size);
}
echo $right ? "right\n" : "wrong\n";
