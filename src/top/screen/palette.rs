//! Colours.

use ratatui::style::{Color, Modifier, Style};

/// Colours by meaning; without colour, by weight.
#[derive(Clone, Copy)]
pub(super) struct Palette {
    pub(super) color: bool,
}

impl Palette {
    pub(super) fn of(self, color: Color, plain: Modifier) -> Style {
        if self.color { Style::new().fg(color) } else { Style::new().add_modifier(plain) }
    }

    pub(super) fn title(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub(super) fn good(self) -> Style {
        self.of(Color::Green, Modifier::BOLD)
    }

    pub(super) fn warn(self) -> Style {
        self.of(Color::Yellow, Modifier::BOLD)
    }

    pub(super) fn dim(self) -> Style {
        self.of(Color::DarkGray, Modifier::DIM)
    }

    pub(super) fn graph(self) -> Style {
        self.of(Color::Cyan, Modifier::empty())
    }
}
