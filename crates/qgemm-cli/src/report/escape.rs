//! Text in HTML and SVG.

use qgemm_api::printable;

/// Text escaped for HTML, without terminal control characters.
pub fn escape(text: &str) -> String {
    let text = printable(text);
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
