//! JSON as written by Python's `json` module, and setting values.
//!
//! Python also writes `NaN`, `Infinity` and `-Infinity`. Some
//! editors add a byte-order mark.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// Python's non-finite numbers, longest first, so that none matches as a prefix.
const NOT_FINITE: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Converts `text` to strict JSON: drops a byte-order mark and quotes non-finite
/// numbers. Everything else is unchanged, errors included.
///
/// ```
/// use qgemm_formats::model::strict_json;
/// assert_eq!(strict_json(r#"{"limits": [0.0, Infinity], "name": "NaN"}"#), r#"{"limits": [0.0, "Infinity"], "name": "NaN"}"#);
/// ```
pub fn strict_json(text: &str) -> Cow<'_, str> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if !NOT_FINITE.iter().any(|token| text.contains(token)) {
        return text.into();
    }
    let mut strict = String::with_capacity(text.len() + 16);
    let (mut copied, mut at, mut in_string) = (0, 0, false);
    while let Some(byte) = text.as_bytes().get(at) {
        let token = NOT_FINITE.iter().find(|token| !in_string && text.as_bytes()[at..].starts_with(token.as_bytes()));
        at += match (byte, token) {
            (_, Some(token)) => {
                strict.extend([&text[copied..at], "\"", token, "\""]);
                copied = at + token.len();
                token.len()
            }
            // An escaped character ends no string. Bytes inside a multi-byte
            // character never equal ASCII.
            (b'\\', None) if in_string => 2,
            (b'"', None) => {
                in_string = !in_string;
                1
            }
            _ => 1,
        };
    }
    strict.push_str(&text[copied..]);
    strict.into()
}

/// JSON value with ordered objects: patterns of layer names are tried in file order.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(String),
    List(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Parses `text`, in Python's dialect too.
    ///
    /// # Errors
    /// Message and position of the syntax error. Also for more than 127 levels of nesting.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(&strict_json(text))
    }

    /// Value of `key`. Of duplicates the last, as in Python. `Null` when absent.
    pub fn get(&self, key: &str) -> &Self {
        let entry = self.entries().iter().rev().find(|(name, _)| name == key);
        entry.map_or(&Self::Null, |(_, value)| value)
    }

    /// Entries of an object. Empty for other values.
    pub fn entries(&self) -> &[(String, Self)] {
        match self {
            Self::Object(entries) => entries,
            _ => &[],
        }
    }

    /// Items of a list. Empty for other values.
    pub fn items(&self) -> &[Self] {
        match self {
            Self::List(values) => values,
            _ => &[],
        }
    }

    /// String value.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }

    pub fn is_object(&self) -> bool {
        matches!(self, Self::Object(_))
    }

    /// Integer value. Accepts strings and a zero fraction.
    pub fn integer(&self) -> Option<i64> {
        match self {
            Self::Integer(value) => Some(*value),
            // Beyond 2^53, neighbouring integers are one f64.
            Self::Float(value) if value.fract() == 0.0 && value.abs() < 9e15 => Some(*value as i64),
            Self::Text(text) => {
                let text = text.trim();
                text.parse().ok().or_else(|| Self::Float(text.parse().ok()?).integer())
            }
            _ => None,
        }
    }

    /// Number.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Integer(value) => Some(*value as f64),
            Self::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// Boolean value. Accepts strings.
    pub fn boolean(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            Self::Text(text) => text.trim().to_ascii_lowercase().parse().ok(),
            _ => None,
        }
    }

    /// Word in lower case, or the digits of a number.
    pub fn word(&self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text.trim().to_ascii_lowercase()),
            Self::Integer(_) | Self::Float(_) => Some(self.to_string()),
            _ => None,
        }
    }

    /// List of sizes.
    pub fn sizes(&self) -> Option<Vec<usize>> {
        match self {
            Self::List(values) => values.iter().map(|value| usize::try_from(value.integer()?).ok()).collect(),
            _ => None,
        }
    }
}

/// JSON text, cut at about a hundred characters.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value}"),
            Self::Text(text) if text.len() <= 100 => write!(f, "\"{text}\""),
            Self::Text(_) => f.write_str("a long string"),
            Self::List(values) if values.len() <= 8 && values.iter().all(|value| value.integer().is_some()) => {
                let values: Vec<_> = values.iter().map(Self::to_string).collect();
                write!(f, "[{}]", values.join(", "))
            }
            Self::List(_) => f.write_str("a list"),
            Self::Object(_) => f.write_str("an object"),
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Integer(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(i64::try_from(value).map_or(Json::Float(value as f64), Json::Integer))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = values.next_element()? {
            list.push(value);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Json::Object(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_python_writes_is_read() {
        let cases = [
            ("\u{feff}{}", Json::Object(vec![])),
            ("[NaN, Infinity,-Infinity]", list(&["NaN", "Infinity", "-Infinity"])),
            (r#"["a NaN", "\"Infinity", "\\", NaN, "é\"NaN"]"#, list(&["a NaN", "\"Infinity", "\\", "NaN", "é\"NaN"])),
            ("18446744073709551615", Json::Float(u64::MAX as f64)),
            (
                r#"{"b": 1, "a": 2, "b": null}"#,
                object(&[("b", Json::Integer(1)), ("a", Json::Integer(2)), ("b", Json::Null)]),
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(Json::parse(text).expect(text), expected, "{text}");
        }
        for text in ["", "NaNa", "-NaN", "\"NaN", "[Infinity", "{NaN: 1}x", "\u{feff}\u{feff}1", "\\NaN", "\"\\"] {
            assert!(Json::parse(text).is_err(), "{text}");
        }
        assert!(object(&[("b", Json::Integer(1)), ("b", Json::Null)]).get("b").is_null());
    }

    #[test]
    fn deep_nesting_is_an_error() {
        for open in ["[", r#"{"a":"#] {
            assert!(Json::parse(&open.repeat(1 << 20)).is_err());
        }
    }

    #[test]
    fn values_are_read_from_strings_too() {
        let json = |text: &str| Json::parse(text).expect("JSON");
        for (text, integer) in [
            ("4", Some(4)),
            ("-1", Some(-1)),
            ("4.0", Some(4)),
            (r#""4""#, Some(4)),
            (r#"" -1 ""#, Some(-1)),
            (r#""4.0""#, Some(4)),
            ("4.5", None),
            ("1e300", None),
            ("NaN", None),
            ("Infinity", None),
            (r#""four""#, None),
            ("true", None),
            ("null", None),
        ] {
            assert_eq!(json(text).integer(), integer, "{text}");
        }
        for (text, value) in [("true", Some(true)), (r#""False""#, Some(false)), ("1", None), (r#""yes""#, None)] {
            assert_eq!(json(text).boolean(), value, "{text}");
        }
        for (text, word) in [(r#""GEMM""#, Some("gemm")), ("2", Some("2")), ("2.5", Some("2.5")), ("[]", None)] {
            assert_eq!(json(text).word().as_deref(), word, "{text}");
        }
        assert_eq!(json(r#"[128, "128"]"#).sizes(), Some(vec![128, 128]));
        assert_eq!(json("[128, -1]").sizes(), None);
    }

    fn list(words: &[&str]) -> Json {
        Json::List(words.iter().map(|word| Json::Text((*word).into())).collect())
    }

    fn object(entries: &[(&str, Json)]) -> Json {
        Json::Object(entries.iter().map(|(key, value)| ((*key).into(), value.clone())).collect())
    }
}
