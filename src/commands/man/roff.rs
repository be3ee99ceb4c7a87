//! Text as roff has it.

/// Sentences fill the width of the page. Indented lines, of examples and tables, stay lines.
pub(super) fn paragraphs(body: &str) -> String {
    let mut page = String::new();
    let mut stays = false;
    for line in body.lines().map(str::trim_end) {
        let is_indented = line.starts_with(' ');
        if is_indented != stays && !line.is_empty() {
            page += if is_indented { ".nf\n" } else { ".fi\n" };
            stays = is_indented;
        }
        page += &match line {
            "" if stays => "\n".to_owned(),
            "" => ".PP\n".to_owned(),
            _ => format!("{}\n", escaped(line)),
        };
    }
    if stays {
        page += ".fi\n";
    }
    page
}

/// A line as roff shows it letter by letter.
pub(super) fn escaped(line: &str) -> String {
    let plain = line.replace('\\', "\\e").replace('-', "\\-").replace('`', "\\(ga").replace('~', "\\(ti");
    // A dot or quote in the first column would be a request.
    if plain.starts_with(['.', '\'']) { format!("\\&{plain}") } else { plain }
}
