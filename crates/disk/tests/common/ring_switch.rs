//! The kernel's switch for FUSE over io_uring. It counts only while a mount is made.

use std::sync::Mutex;

const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// How many tests need it on, and what it was before the first.
static USERS: Mutex<(usize, String)> = Mutex::new((0, String::new()));

/// Says why there are no rings here, if there are none.
pub fn cannot_ring() -> Option<&'static str> {
    // A test that turns it on between the two would find it off again.
    let _users = USERS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    match std::fs::read_to_string(SWITCH).map(|now| std::fs::write(SWITCH, now)) {
        Err(_) => Some("the kernel has no FUSE over io_uring (Linux 6.14)"),
        Ok(Err(_)) => Some("FUSE over io_uring cannot be turned on here"),
        Ok(Ok(())) => None,
    }
}

/// While it lives, the kernel offers rings. Dropped, also by a test that fails, it puts the setting back.
pub struct RingsOn;

impl RingsOn {
    pub fn new() -> Self {
        let mut users = USERS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if users.0 == 0 {
            users.1 = std::fs::read_to_string(SWITCH).unwrap();
            std::fs::write(SWITCH, "Y").unwrap();
        }
        users.0 += 1;
        Self
    }
}

impl Drop for RingsOn {
    fn drop(&mut self) {
        let mut users = USERS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        users.0 -= 1;
        if users.0 == 0 {
            let _ = std::fs::write(SWITCH, &users.1);
        }
    }
}
