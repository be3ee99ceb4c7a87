//! A pseudo-terminal.

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;

/// Opens one of 80 columns and 24 lines. Returns its keyboard and screen, and what opens its other end for a program.
pub fn open() -> (File, impl Fn() -> File) {
    let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a pseudo-terminal");
    grantpt(&keyboard).expect("grantpt");
    unlockpt(&keyboard).expect("unlockpt");
    tcsetwinsize(&keyboard, Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 }).expect("its size");
    let name = ptsname(&keyboard, Vec::new()).expect("its name").into_string().expect("a name in ASCII");
    (File::from(keyboard), move || File::options().read(true).write(true).open(&name).expect("the terminal"))
}
