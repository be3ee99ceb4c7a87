//! What the daemon does with a client's leftover: plain memory with twins that the budget of mappings keeps private, and the
//! client's own copies of pages of files that it maps.
//!
//! KSM needs no mapping for a page, and merges such copies where they are. So the agent hands such a client's memory to KSM,
//! if KSM runs: the daemon changes none of KSM's settings. KSM knows no domains, so only clients of an unnamed domain are
//! handed over.

use crate::config::Leftover;
use crate::domain_key::{DomainKey, UNNAMED_DOMAIN};
use pagefold_os::{Errno, ksm};

/// What became of a client's leftover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    /// No page with a twin was left out.
    #[default]
    None,
    /// No page with a twin was left out; the agent has handed private mappings of files to KSM.
    FilesHanded,
    /// The agent has handed it to KSM.
    Handed,
    /// This daemon hands nothing.
    Off,
    /// The client's domain has a name of its own.
    Named,
    /// The kernel has no KSM.
    NoKsm,
    /// KSM does not run.
    Rests,
    /// The agent did not hand it.
    Refused(Errno),
}

impl State {
    /// What it is if `policy` decides about a client of the domain `key` with a leftover: `None` if the agent shall hand it.
    pub(crate) fn before_asking(policy: Leftover, key: &DomainKey) -> Option<State> {
        match policy {
            Leftover::Private => Some(State::Off),
            Leftover::Ksm if key.1 != UNNAMED_DOMAIN => Some(State::Named),
            Leftover::Ksm => match ksm::read("run") {
                Ok(1) => None,
                Ok(_) => Some(State::Rests),
                Err(_) => Some(State::NoKsm),
            },
        }
    }

    /// For people; empty for a client without a leftover.
    pub(crate) fn text(self) -> String {
        match self {
            State::None => String::new(),
            State::FilesHanded => "private mappings of files handed to KSM".into(),
            State::Handed => "handed to KSM".into(),
            State::Off => "private: --leftover private".into(),
            State::Named => "private: its domain has a name, and KSM merges across all domains".into(),
            State::NoKsm => "private: this kernel has no KSM".into(),
            State::Rests => "private: KSM does not run (echo 1 > /sys/kernel/mm/ksm/run)".into(),
            State::Refused(errno) => format!("private: the agent could not hand it to KSM: {errno}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_clients_of_unnamed_domains_are_handed_over() {
        let of = |policy, name: &str| State::before_asking(policy, &(1000, name.to_owned()));
        assert_eq!(of(Leftover::Private, UNNAMED_DOMAIN), Some(State::Off));
        assert_eq!(of(Leftover::Ksm, "customer-7"), Some(State::Named));
        let runs = ksm::read("run").ok();
        let wanted = match runs {
            Some(1) => None,
            Some(_) => Some(State::Rests),
            None => Some(State::NoKsm),
        };
        assert_eq!(of(Leftover::Ksm, UNNAMED_DOMAIN), wanted);
    }
}
