//! JSON Schema validator for the keywords of the plan schemas.

use serde_json::{Value, json};

/// Checks a value against a schema.
pub fn validate(schema: &Value, root: &Value, value: &Value, at: &str) {
    const KNOWN: [&str; 17] = [
        "$ref",
        "$schema",
        "$id",
        "$defs",
        "title",
        "description",
        "type",
        "const",
        "enum",
        "anyOf",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "minimum",
        "maximum",
        "pattern",
    ];
    let schema = match schema["$ref"].as_str() {
        Some(name) => &root["$defs"][name.strip_prefix("#/$defs/").expect("a local name")],
        None => schema,
    };
    let object = schema.as_object().unwrap_or_else(|| panic!("{at}: no schema"));
    let unknown: Vec<_> = object.keys().filter(|k| !KNOWN.contains(&k.as_str()) && !k.ends_with("Items")).collect();
    assert!(unknown.is_empty(), "{at}: this test does not know {unknown:?}");
    let is_type = |name: &str| match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("{at}: no type {other}"),
    };
    match &schema["type"] {
        Value::String(name) => assert!(is_type(name), "{at}: expected {name}, got {value}"),
        Value::Array(names) => {
            assert!(
                names.iter().any(|n| is_type(n.as_str().expect("a name"))),
                "{at}: expected {names:?}, got {value}"
            );
        }
        _ => {}
    }
    if let Some(expected) = schema.get("const") {
        assert_eq!(value, expected, "{at}");
    }
    if let Some(choices) = schema["enum"].as_array() {
        assert!(choices.contains(value), "{at}: {value} is none of {choices:?}");
    }
    if let Some([first, null]) = schema["anyOf"].as_array().map(Vec::as_slice) {
        assert_eq!(null["type"], "null", "{at}: what else ours have");
        if !value.is_null() {
            validate(first, root, value, at);
        }
    }
    if let (Some(least), Some(got)) = (schema["minimum"].as_f64(), value.as_f64()) {
        assert!(got >= least && got <= schema["maximum"].as_f64().unwrap_or(f64::INFINITY), "{at}: {got}");
    }
    match schema["pattern"].as_str() {
        None => {}
        Some(pattern) => {
            let digits = pattern.strip_prefix("^[0-9a-f]{").and_then(|p| p.strip_suffix("}$")).expect("of digits");
            let text = value.as_str().expect("a text");
            assert!(text.len().to_string() == digits && text.chars().all(|c| c.is_ascii_hexdigit()), "{at}: {text}");
        }
    }
    if let Some(fields) = value.as_object().filter(|_| schema["properties"].is_object()) {
        for name in schema["required"].as_array().into_iter().flatten() {
            assert!(fields.contains_key(name.as_str().expect("a name")), "{at}: {name} is missing");
        }
        for (name, value) in fields {
            let known = schema["properties"].get(name);
            assert!(
                known.is_some() || schema["additionalProperties"] != json!(false),
                "{at}: {name} is not in the schema"
            );
            known.iter().for_each(|schema| validate(schema, root, value, &format!("{at}.{name}")));
        }
    }
    for (place, item) in value.as_array().into_iter().flatten().enumerate() {
        validate(&schema["items"], root, item, &format!("{at}[{place}]"));
    }
}
