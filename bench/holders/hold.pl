# Holds a file in strings; see README.md.
use strict;
use warnings;
my ($path, $size) = @ARGV;
my @held;
open(my $file, '<:raw', $path) or die $!;
while ((my $got = sysread($file, my $block, $size)) == $size) { push @held, $block }
$| = 1;
print "ready\n";
defined(<STDIN>) or exit 1;
sysseek($file, 0, 0);
my $right = @held > 0;
for my $block (@held) {
    $right &&= sysread($file, my $expected, $size) == $size;
    $right &&= $block eq $expected;
}
print $right ? "right\n" : "wrong\n";
