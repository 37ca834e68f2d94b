//! Contents of a page, printed as self-contained HTML or as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::chart::Chart;
use super::escape::escape;
use super::series::{Mark, Series};
use super::styles::{COLOURS, Styles};

/// A page in progress.
#[derive(Serialize)]
pub struct Page {
    title: String,
    contents: Vec<Element>,
    #[serde(skip)]
    styles: Styles,
}

/// Element of a page.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Element {
    Section { title: String },
    Part { title: String },
    Text { text: String },
    Numbers { numbers: Vec<Number> },
    Table { columns: Vec<Title>, rows: Vec<Vec<Cell>> },
    Chart(Chart),
}

/// A large number with its label.
#[derive(Serialize)]
struct Number {
    value: String,
    label: String,
}

/// Title of a column.
#[derive(Serialize)]
#[serde(transparent)]
struct Title {
    text: String,
    #[serde(skip)]
    is_of_numbers: bool,
}

/// A cell of a table.
#[derive(Clone, Serialize)]
#[serde(transparent)]
pub struct Cell {
    text: String,
    /// Shown as a fault.
    #[serde(skip)]
    is_bad: bool,
}

impl Cell {
    /// A fault.
    pub fn bad(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_bad: true }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self { text: text.into(), is_bad: false }
    }
}

const STYLE: &str = "
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem 1rem 4rem;background:var(--back);color:var(--ink);
 font:16px/1.5 system-ui,-apple-system,Segoe UI,Roboto,sans-serif}
h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0 1rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.5rem 0 .5rem;padding-top:1rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.5rem 0 .25rem}
p{margin:.5rem 0;color:var(--soft);overflow-wrap:anywhere}
.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.5rem;margin:1rem 0}
.numbers div{border:1px solid var(--line);border-radius:.5rem;padding:.5rem .75rem;overflow-wrap:anywhere}
.numbers b{display:block;font-size:1.15rem;line-height:1.3}
.numbers span{font-size:.8rem;color:var(--soft)}
.wide{overflow-x:auto;margin:.75rem 0}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.3rem .75rem .3rem 0;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
td{overflow-wrap:break-word}
th{font-weight:600;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}
th.n:first-child{width:1%}
figure{margin:.75rem 0}
svg{display:block;width:100%;max-width:48rem;height:auto}
svg text{fill:var(--soft);font:14px system-ui,-apple-system,Segoe UI,Roboto,sans-serif}
@media(min-width:40rem){svg text{font-size:9.5px}}
.g{stroke:var(--line);stroke-width:.7}
.a{stroke:var(--soft);fill:none}
.l{stroke:var(--c);stroke-width:1.6;fill:none}
.r{stroke:var(--c);stroke-width:1.1;fill:none}
.m{fill:var(--c);stroke:var(--back);stroke-width:.5}
.m:hover{stroke:var(--ink);stroke-width:1.5}
figcaption ul{list-style:none;display:flex;flex-wrap:wrap;gap:.25rem 1rem;margin:.5rem 0 0;padding:0;font-size:.85rem}
figcaption li{display:flex;align-items:center;gap:.4rem}
figcaption svg{width:30px;height:12px;flex:none}
.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}
";

impl Page {
    /// An empty page.
    pub fn new(title: &str) -> Self {
        Self { title: title.to_owned(), contents: Vec::new(), styles: Styles::default() }
    }

    /// Begins a section.
    pub fn section(&mut self, title: impl Into<String>) {
        self.contents.push(Element::Section { title: title.into() });
    }

    /// Begins a part of a section.
    pub fn part(&mut self, title: impl Into<String>) {
        self.contents.push(Element::Part { title: title.into() });
    }

    /// Adds a paragraph.
    pub fn text(&mut self, text: impl Into<String>) {
        self.contents.push(Element::Text { text: text.into() });
    }

    /// Adds large numbers, each with a label.
    pub fn numbers(&mut self, numbers: &[(String, &str)]) {
        let number = |(value, label): &(String, &str)| Number { value: value.clone(), label: (*label).to_owned() };
        self.contents.push(Element::Numbers { numbers: numbers.iter().map(number).collect() });
    }

    /// Adds a table. Titles of columns of numbers begin with `#`.
    pub fn table(&mut self, columns: &[impl ToString], rows: Vec<Vec<Cell>>) {
        let title = |column: &_| {
            let text = ToString::to_string(column);
            let name = text.strip_prefix('#').map(str::to_owned);
            Title { is_of_numbers: name.is_some(), text: name.unwrap_or(text) }
        };
        let columns = columns.iter().map(title).collect();
        self.contents.push(Element::Table { columns, rows });
    }

    /// Adds a chart.
    pub fn chart(&mut self, chart: Chart) {
        chart.series.iter().for_each(|series| self.styles.add(series));
        self.contents.push(Element::Chart(chart));
    }

    /// The whole page.
    pub fn html(&self) -> String {
        let colours = |of: usize| {
            let series = COLOURS.iter().enumerate().map(|(i, colours)| format!("--s{i}:{};", colours[of]));
            series.collect::<String>()
        };
        let light = "--back:#fff;--ink:#1b1f24;--soft:#57606a;--line:#d8dee4;--good:#0a7d55;--bad:#b3174f;";
        let dark = "--back:#14171a;--ink:#e6e9ec;--soft:#a4adb6;--line:#343a40;--good:#46d39a;--bad:#ff86ab;";
        let mut body = String::new();
        for element in &self.contents {
            self.element(&mut body, element);
        }
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n<style>\n\
             :root{{color-scheme:light dark;{light}{light_series}}}\n\
             @media(prefers-color-scheme:dark){{:root{{{dark}{dark_series}}}}}{STYLE}</style></head>\n\
             <body><h1>{title}</h1>\n{body}</body></html>\n",
            title = escape(&self.title),
            light_series = colours(0),
            dark_series = colours(1),
        )
    }

    fn element(&self, body: &mut String, element: &Element) {
        // Writing to a String cannot fail.
        let _ = match element {
            Element::Section { title } => writeln!(body, "<h2>{}</h2>", escape(title)),
            Element::Part { title } => writeln!(body, "<h3>{}</h3>", escape(title)),
            Element::Text { text } => writeln!(body, "<p>{}</p>", escape(text)),
            Element::Numbers { numbers } => {
                let cell = |Number { value, label }: &Number| {
                    format!("<div><b>{}</b><span>{}</span></div>", escape(value), escape(label))
                };
                writeln!(body, "<div class=\"numbers\">{}</div>", numbers.iter().map(cell).collect::<String>())
            }
            Element::Table { columns, rows } => writeln!(body, "{}", table(columns, rows)),
            Element::Chart(chart) => {
                let entry = |series: &Series| format!("<li>{}{}</li>", self.sample(series), escape(&series.name));
                let legend = chart.series.iter().map(entry).collect::<String>();
                let svg = chart.svg(&self.styles);
                writeln!(body, "<figure>{svg}<figcaption><ul>{legend}</ul></figcaption></figure>")
            }
        };
    }

    /// Line and marker of a series, for the legend.
    fn sample(&self, series: &Series) -> String {
        let style = self.styles.of(series);
        let class = if series.mark == Mark::Guide { "r" } else { "l" };
        let line = match series.mark {
            Mark::Dots => String::new(),
            _ => format!("<path class=\"{class}\"{} d=\"M0 6H30\"/>", style.dash()),
        };
        let marker = match series.mark {
            Mark::Guide => String::new(),
            _ => format!("<path class=\"m\" d=\"{}\"/>", style.marker(15.0, 6.0)),
        };
        format!("<svg viewBox=\"0 0 30 12\" style=\"--c:{}\" aria-hidden=\"true\">{line}{marker}</svg>", style.colour())
    }
}

fn table(columns: &[Title], rows: &[Vec<Cell>]) -> String {
    let class = |column: &Title| if column.is_of_numbers { " class=\"n\"" } else { "" };
    let title = |column: &Title| format!("<th{}>{}</th>", class(column), escape(&column.text));
    let cell = |(cell, column): (&Cell, &Title)| match cell.is_bad {
        true => format!("<td{}><span class=\"bad\">{}</span></td>", class(column), escape(&cell.text)),
        false => format!("<td{}>{}</td>", class(column), escape(&cell.text)),
    };
    let row = |row: &Vec<Cell>| format!("<tr>{}</tr>", row.iter().zip(columns).map(cell).collect::<String>());
    let (titles, rows) = (columns.iter().map(title).collect::<String>(), rows.iter().map(row).collect::<String>());
    format!("<div class=\"wide\"><table><tr>{titles}</tr>{rows}</table></div>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_files_are_text() {
        let mut page = Page::new("a <b> & c");
        page.table(&["#x"], vec![vec!["<script>".into()], vec![Cell::bad("\"bad\"")]]);
        let html = page.html();
        assert!(html.contains("<title>a &lt;b&gt; &amp; c</title>") && !html.contains("<script>"), "{html}");
        assert!(html.contains("<span class=\"bad\">&quot;bad&quot;</span>"));
    }

    #[test]
    fn pages_load_nothing_have_both_modes_and_are_json_too() {
        let mut page = Page::new("t");
        let series = Series { name: "s".into(), mark: Mark::Line, points: vec![(1.0, 2.0)] };
        page.chart(Chart::new("x", "y", vec![series]).expect("a point"));
        page.table(&["#x"], vec![vec![Cell::bad("1")]]);
        let html = page.html();
        assert!(html.contains("prefers-color-scheme:dark") && html.contains("--c:var(--s0)"));
        let elsewhere = ["src=", "href=", "url(", "@import"];
        assert!(elsewhere.iter().all(|word| !html.contains(word)));
        let json = serde_json::to_value(&page).expect("JSON");
        assert_eq!(json["contents"][0]["series"][0]["points"][0], serde_json::json!([1.0, 2.0]));
        assert_eq!(json["contents"][1], serde_json::json!({"kind": "table", "columns": ["x"], "rows": [["1"]]}));
    }
}
