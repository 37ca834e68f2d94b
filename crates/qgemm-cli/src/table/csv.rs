//! Tables as CSV (RFC 4180): the fields of JSON, nested ones as
//! `outer.inner`, lists as JSON.

use std::collections::HashMap;
use std::fmt;

use anyhow::Context as _;
use qgemm_api::printable;
use serde::Serialize;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

/// A title line and a line for each row. Titles are the fields of all
/// rows, in the order of their first use.
///
/// # Errors
/// When a row is not serialized as an object.
pub fn text<R: Serialize>(rows: &[R]) -> anyhow::Result<String> {
    let mut titles: Vec<String> = Vec::new();
    let mut lines: Vec<HashMap<String, String>> = Vec::new();
    for row in rows {
        let Fields(fields) = serde_json::from_str(&serde_json::to_string(row)?).context("a row is no object")?;
        let mut cells = HashMap::new();
        for (name, value) in fields {
            flatten(name, value, &mut |name, cell| {
                if !titles.contains(&name) {
                    titles.push(name.clone());
                }
                cells.insert(name, cell);
            });
        }
        lines.push(cells);
    }
    let mut writer = csv::Writer::from_writer(Vec::new());
    if !titles.is_empty() {
        writer.write_record(&titles)?;
    }
    for cells in &lines {
        writer.write_record(titles.iter().map(|title| cells.get(title).map_or("", String::as_str)))?;
    }
    Ok(String::from_utf8(writer.into_inner().map_err(|error| error.into_error())?)?)
}

/// The fields of an object in their order.
struct Fields(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }
        from.deserialize_map(Object)
    }
}

fn flatten(name: String, value: Value, cell: &mut impl FnMut(String, String)) {
    match value {
        Value::Object(fields) => {
            fields.into_iter().for_each(|(inner, value)| flatten(format!("{name}.{inner}"), value, cell))
        }
        Value::Null => cell(name, String::new()),
        Value::String(text) => cell(name, printable(&text)),
        other => cell(name, printable(&other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_field_is_a_column_and_text_is_quoted() {
        #[derive(Serialize)]
        struct Outer {
            z: &'static str,
            a: Option<f64>,
            list: [u32; 2],
            inner: Value,
        }
        let row = |z, a, inner| Outer { z, a, list: [1, 2], inner };
        let rows = [row("x, \"y\"", Some(0.125), json!({"b": 1})), row("\u{1b}[2J", None, json!({"c": true}))];
        let text = text(&rows).expect("objects");
        let escape = printable("\u{1b}");
        let expected =
            format!("z,a,list,inner.b,inner.c\n\"x, \"\"y\"\"\",0.125,\"[1,2]\",1,\n{escape}[2J,,\"[1,2]\",,true\n");
        assert_eq!(text, expected);
        assert_eq!(super::text::<Outer>(&[]).expect("nothing"), "");
    }
}
