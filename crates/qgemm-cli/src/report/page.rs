//! Self-contained HTML page.

use std::fmt::Write as _;

use qgemm_api::printable;

/// A page in progress.
pub struct Page {
    title: String,
    body: String,
}

/// Colors of series, distinct also for red-green blindness, on
/// both backgrounds. `--s0` to `--s9`.
const SERIES: [[&str; 2]; 10] = [
    ["#0b63ce", "#6cb2ff"],
    ["#c4490a", "#ff9a5c"],
    ["#0a7d55", "#46d39a"],
    ["#8a3fb0", "#cf97f0"],
    ["#8f6a00", "#e6c04c"],
    ["#b3174f", "#ff86ab"],
    ["#1a7f93", "#5fd3e6"],
    ["#5c6b00", "#bccf4e"],
    ["#6b5b4b", "#c9b8a5"],
    ["#4a55a8", "#a5aef2"],
];

const STYLE: &str = "
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem 1rem 4rem;background:var(--back);color:var(--ink);
 font:16px/1.5 system-ui,-apple-system,Segoe UI,Roboto,sans-serif}
h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0 1rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.5rem 0 .5rem;padding-top:1rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.5rem 0 .25rem}
p{margin:.5rem 0;color:var(--soft)}
.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.5rem;margin:1rem 0}
.numbers div{border:1px solid var(--line);border-radius:.5rem;padding:.5rem .75rem;overflow-wrap:anywhere}
.numbers b{display:block;font-size:1.15rem;line-height:1.3}
.numbers span{font-size:.8rem;color:var(--soft)}
.wide{overflow-x:auto;margin:.75rem 0}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.3rem .75rem .3rem 0;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}
th.n:first-child{width:1%}
figure{margin:.75rem 0}
svg{display:block;width:100%;max-width:48rem;height:auto;color:var(--ink)}
svg text{fill:var(--soft);font-family:inherit}
@media(min-width:40rem){svg text{font-size:9.5px}}
figcaption ul{list-style:none;display:flex;flex-wrap:wrap;gap:.25rem 1rem;margin:.5rem 0 0;padding:0;font-size:.85rem}
figcaption i{display:inline-block;width:.8em;height:.8em;border-radius:50%;margin-right:.4em}
.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}
";

impl Page {
    /// An empty page.
    pub fn new(title: &str) -> Self {
        Self { title: escape(title), body: String::new() }
    }

    /// Begins a section.
    pub fn section(&mut self, title: &str) {
        let _ = writeln!(self.body, "<h2>{}</h2>", escape(title));
    }

    /// Begins a part of a section.
    pub fn part(&mut self, title: &str) {
        let _ = writeln!(self.body, "<h3>{}</h3>", escape(title));
    }

    /// Adds a paragraph.
    pub fn text(&mut self, text: &str) {
        let _ = writeln!(self.body, "<p>{}</p>", escape(text));
    }

    /// Adds large numbers, each with a label.
    pub fn numbers(&mut self, numbers: &[(String, &str)]) {
        let cells = numbers
            .iter()
            .map(|(number, what)| format!("<div><b>{}</b><span>{}</span></div>", escape(number), escape(what)));
        let _ = writeln!(self.body, "<div class=\"numbers\">{}</div>", cells.collect::<String>());
    }

    /// Adds a chart, with the names and color indices of its series.
    pub fn chart(&mut self, svg: &str, series: &[(String, usize)]) {
        let named = series.iter().map(|(name, colour)| {
            format!("<li><i style=\"background:var(--s{})\"></i>{}</li>", colour % SERIES.len(), escape(name))
        });
        let (svg, named) = (themed(svg), named.collect::<String>());
        let _ = writeln!(self.body, "<figure>{svg}<figcaption><ul>{named}</ul></figcaption></figure>");
    }

    /// Adds a table. Titles that start with `#` mean numbers; cells
    /// that start with `!` are highlighted.
    pub fn table(&mut self, titles: &[&str], rows: &[Vec<String>]) {
        let class = |title: &str| if title.starts_with('#') { " class=\"n\"" } else { "" };
        let head = titles.iter().map(|t| format!("<th{}>{}</th>", class(t), escape(t.trim_start_matches('#'))));
        let _ = write!(self.body, "<div class=\"wide\"><table><thead><tr>{}</tr></thead>", head.collect::<String>());
        for row in rows {
            let cell = |(cell, title): (&String, &&str)| match cell.strip_prefix('!') {
                Some(bad) => format!("<td{}><span class=\"bad\">{}</span></td>", class(title), escape(bad)),
                None => format!("<td{}>{}</td>", class(title), escape(cell)),
            };
            let _ = write!(self.body, "<tr>{}</tr>", row.iter().zip(titles).map(cell).collect::<String>());
        }
        self.body += "</table></div>\n";
    }

    /// The whole page.
    pub fn html(&self) -> String {
        let colours = |of: usize| {
            let series = SERIES.iter().enumerate().map(|(i, colours)| format!("--s{i}:{};", colours[of]));
            series.collect::<String>()
        };
        let light = "--back:#fff;--ink:#1b1f24;--soft:#57606a;--line:#d8dee4;--good:#0a7d55;--bad:#b3174f;";
        let dark = "--back:#14171a;--ink:#e6e9ec;--soft:#a4adb6;--line:#343a40;--good:#46d39a;--bad:#ff86ab;";
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n<style>\n\
             :root{{color-scheme:light dark;{light}{light_series}}}\n\
             @media(prefers-color-scheme:dark){{:root{{{dark}{dark_series}}}}}{STYLE}</style></head>\n\
             <body><h1>{title}</h1>\n{body}</body></html>\n",
            title = self.title,
            body = self.body,
            light_series = colours(0),
            dark_series = colours(1),
        )
    }
}

/// Placeholder color of series `i` in a chart. The page replaces
/// it.
pub fn series_colour(i: usize) -> (u8, u8, u8) {
    (0xFE, 0xDC, (i % SERIES.len()) as u8)
}

/// A chart in the page's colors.
fn themed(svg: &str) -> String {
    let mut svg = svg.replace("\"#000000\"", "\"currentColor\"").replace("\"#808080\"", "\"var(--line)\"");
    for i in 0..SERIES.len() {
        let (r, g, b) = series_colour(i);
        svg = svg.replace(&format!("\"#{r:02X}{g:02X}{b:02X}\""), &format!("\"var(--s{i})\""));
    }
    svg
}

/// Text escaped for HTML, without terminal control characters.
fn escape(text: &str) -> String {
    let text = printable(text);
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_files_are_text() {
        let mut page = Page::new("a <b> & c");
        page.table(&["#x"], &[vec!["<script>".into()], vec!["!\"bad\"".into()]]);
        let html = page.html();
        assert!(html.contains("<title>a &lt;b&gt; &amp; c</title>") && !html.contains("<script>"), "{html}");
        assert!(html.contains("<span class=\"bad\">&quot;bad&quot;</span>"));
    }

    #[test]
    fn pages_load_nothing_and_have_both_modes() {
        let mut page = Page::new("t");
        page.chart(
            "<svg xmlns=\"http://www.w3.org/2000/svg\"><g stroke=\"#FEDC03\" fill=\"#000000\"/></svg>",
            &[("s".into(), 3)],
        );
        let html = page.html();
        assert!(html.contains("prefers-color-scheme:dark") && html.contains("stroke=\"var(--s3)\""));
        assert!(html.contains("fill=\"currentColor\""));
        let elsewhere = ["src=", "href=", "url(", "@import"];
        assert!(elsewhere.iter().all(|word| !html.contains(word)));
    }
}
