//! Validates JSON against the schemas of docs/schemas: the part of JSON Schema 2020-12 that they use. A keyword that is
//! not known here is an error, so that no rule is believed to be checked that is not.

#![allow(dead_code)]

use serde_json::Value;

/// A schema of docs/schemas, by name.
pub fn schema(name: &str) -> Value {
    let path = format!("{}/docs/schemas/{name}.json", root());
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The root of the source tree.
pub fn root() -> &'static str {
    // The bench crate includes this file too.
    let here = env!("CARGO_MANIFEST_DIR");
    here.strip_suffix("/bench").unwrap_or(here)
}

/// Fails with all that is wrong if `value` is not as the schema `name` says.
pub fn assert_valid(name: &str, value: &Value) {
    let wrong = violations(&schema(name), value);
    assert!(wrong.is_empty(), "docs/schemas/{name}.json:\n{}\nin {value:#}", wrong.join("\n"));
}

/// What is wrong with `value`, one line each.
pub fn violations(schema: &Value, value: &Value) -> Vec<String> {
    let mut wrong = Vec::new();
    check(schema, schema, value, "", &mut wrong);
    wrong
}

fn is(kind: &str, value: &Value) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        _ => panic!("no type {kind}"),
    }
}

fn check(root: &Value, schema: &Value, value: &Value, at: &str, wrong: &mut Vec<String>) {
    let rules = match schema {
        Value::Bool(true) => return,
        Value::Bool(false) => return wrong.push(format!("{at}: nothing is allowed here")),
        schema => schema.as_object().expect("a schema is an object or a boolean"),
    };
    for (keyword, rule) in rules {
        match keyword.as_str() {
            "$schema" | "$id" | "$comment" | "$defs" | "title" | "description" => {}
            "$ref" => {
                let name = rule.as_str().and_then(|name| name.strip_prefix('#')).expect("a reference inside");
                let found = root.pointer(name).unwrap_or_else(|| panic!("{name} is not defined"));
                check(root, found, value, at, wrong);
            }
            "type" => {
                let kinds: Vec<&str> = match rule {
                    Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
                    kind => vec![kind.as_str().expect("a type is a word")],
                };
                if !kinds.iter().any(|kind| is(kind, value)) {
                    wrong.push(format!("{at}: {value} is not {}", kinds.join(" or ")));
                }
            }
            "enum" => {
                if !rule.as_array().expect("a list").contains(value) {
                    wrong.push(format!("{at}: {value} is none of {rule}"));
                }
            }
            "minimum" => {
                let least = rule.as_f64().expect("a number");
                if value.as_f64().is_some_and(|value| value < least) {
                    wrong.push(format!("{at}: {value} is less than {least}"));
                }
            }
            "required" => {
                let Some(object) = value.as_object() else { continue };
                for key in rule.as_array().expect("a list").iter().filter_map(Value::as_str) {
                    if !object.contains_key(key) {
                        wrong.push(format!("{at}: no {key}"));
                    }
                }
            }
            "dependentRequired" => {
                let Some(object) = value.as_object() else { continue };
                for (key, others) in rule.as_object().expect("an object") {
                    for other in others.as_array().expect("a list").iter().filter_map(Value::as_str) {
                        if object.contains_key(key) && !object.contains_key(other) {
                            wrong.push(format!("{at}: {key} without {other}"));
                        }
                    }
                }
            }
            "properties" => {
                let Some(object) = value.as_object() else { continue };
                for (key, rule) in rule.as_object().expect("an object") {
                    if let Some(value) = object.get(key) {
                        check(root, rule, value, &format!("{at}/{key}"), wrong);
                    }
                }
            }
            "additionalProperties" => {
                let Some(object) = value.as_object() else { continue };
                let known = rules.get("properties").and_then(Value::as_object);
                for (key, value) in
                    object.iter().filter(|(key, _)| !known.is_some_and(|known| known.contains_key(*key)))
                {
                    if rule == &Value::Bool(false) {
                        wrong.push(format!("{at}: {key} is not known"));
                    } else {
                        check(root, rule, value, &format!("{at}/{key}"), wrong);
                    }
                }
            }
            "propertyNames" => {
                let Some(object) = value.as_object() else { continue };
                for key in object.keys() {
                    check(root, rule, &Value::String(key.clone()), &format!("{at}/{key}"), wrong);
                }
            }
            "prefixItems" => {
                let Some(items) = value.as_array() else { continue };
                for (number, (rule, item)) in rule.as_array().expect("a list").iter().zip(items).enumerate() {
                    check(root, rule, item, &format!("{at}/{number}"), wrong);
                }
            }
            "items" => {
                let Some(items) = value.as_array() else { continue };
                let first = rules.get("prefixItems").and_then(Value::as_array).map_or(0, Vec::len);
                for (number, item) in items.iter().enumerate().skip(first) {
                    check(root, rule, item, &format!("{at}/{number}"), wrong);
                }
            }
            "minItems" => {
                let least = rule.as_u64().expect("a count") as usize;
                if value.as_array().is_some_and(|items| items.len() < least) {
                    wrong.push(format!("{at}: fewer than {least} items"));
                }
            }
            "oneOf" => {
                let all: Vec<Vec<String>> = rule
                    .as_array()
                    .expect("a list")
                    .iter()
                    .map(|rule| {
                        let mut wrong = Vec::new();
                        check(root, rule, value, at, &mut wrong);
                        wrong
                    })
                    .collect();
                if all.iter().filter(|wrong| wrong.is_empty()).count() != 1 {
                    wrong.push(format!("{at}: not exactly one alternative fits: {all:?}"));
                }
            }
            other => panic!("{at}: this validator does not know {other}"),
        }
    }
}
