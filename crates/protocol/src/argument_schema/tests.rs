use std::collections::HashSet;

use serde_json::json;

use super::*;

fn compile(schema: Value) -> Result<ArgumentSchema, String> {
    ArgumentSchema::compile(&schema, &mut CompileBudget::default())
}

fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(CHECK_STACK_BYTES);
        thread.spawn_scoped(scope, work).unwrap().join().unwrap()
    })
}

/// Checks a property `x` against a schema.
fn check_x(definitions: Value, x: Value, value: Value) -> ArgumentVerdict {
    let schema = json!({"type": "object", "$defs": definitions, "properties": {"x": x}});
    on_large_stack(|| {
        let compiled = compile(schema).unwrap();
        compiled.check(&json!({ "x": value }), CheckEffort::Full)
    })
}

fn doubling(keyword: &str, levels: usize) -> Value {
    let mut definitions = serde_json::Map::new();
    definitions.insert("d0".into(), json!({"type": "string"}));
    for level in 1..=levels {
        let before = json!({ "$ref": format!("#/$defs/d{}", level - 1) });
        definitions.insert(format!("d{level}"), json!({ keyword: [before, before] }));
    }
    let top = json!({ "$ref": format!("#/$defs/d{levels}") });
    json!({"type": "object", "$defs": definitions, "properties": {"x": top}})
}

#[test]
fn schemas_that_stand_for_too_much_are_refused() {
    let chain = |length: usize| {
        let links: serde_json::Map<_, _> = (0..length)
            .map(|n| (format!("d{n}"), json!({ "$ref": format!("#/$defs/d{}", n + 1) })))
            .collect();
        json!({"type": "object", "$defs": links, "properties": {"x": {"$ref": "#/$defs/d0"}}})
    };
    let mut unevaluated = json!({"type": "object"});
    for _ in 0..15 {
        unevaluated =
            json!({"type": "object", "unevaluatedProperties": {"allOf": [unevaluated, unevaluated]}});
    }
    let mut deep = json!({"type": "object"});
    for _ in 0..40 {
        deep = json!({"type": "object", "properties": {"a": deep}});
    }
    let overlapping = {
        let mut nested = json!({});
        for _ in 0..20 {
            nested = json!({ "items": nested });
        }
        let path = |n: usize| format!("#/$defs/d{}", "/items".repeat(n % 20));
        let wide: Vec<_> = (0..300).map(|n| json!({ "$ref": path(n) })).collect();
        json!({"type": "object", "$defs": {"d": {"items": nested, "prefixItems": wide}},
            "properties": {"x": {"$ref": "#/$defs/d"}}})
    };
    // Overlapping references to a few places are compiled once for each place.
    assert!(on_large_stack(|| compile(overlapping)).is_ok());
    for bad in [
        doubling("allOf", 19),
        doubling("anyOf", 60),
        doubling("oneOf", 30),
        chain(40),
        unevaluated,
        deep,
        json!({"type": "object", "allOf": [{"$ref": "#"}]}),
        json!({"type": "object", "$ref": "#"}),
        json!({"type": "object", "$dynamicAnchor": "a", "anyOf": [{"$dynamicRef": "#a"}]}),
        json!({"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}}),
        json!({"type": "object", "properties": {"a": {"$id": "http://a.test/"}}}),
        json!({"type": "object", "properties": {"a": {"$ref": "http://a.test/"}}}),
        json!({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}),
        json!({"type": "object", "properties": {"a": {"$ref": "#nobody"}}}),
        json!({"type": "object", "properties": {"a": {"pattern": "(a+)+\\1"}}}),
        json!({"type": "object", "properties": {"a": {"pattern": "((a{999}){999}){999}"}}}),
        json!({"type": "object", "patternProperties": {"((a{999}){999}){999}": {}}}),
        json!({"type": "object", "description": "x".repeat(MAX_SCHEMA_BYTES)}),
        json!({"type": "object", "allOf": vec![json!({}); 5000]}),
        json!({"type": "object", "prefixItems": vec![json!({}); 11_000]}),
        json!({"type": "string"}),
    ] {
        let text = bad.to_string();
        let refused = on_large_stack(|| compile(bad));
        assert!(refused.is_err(), "{}", &text[..text.len().min(200)]);
    }
}

#[test]
fn names_and_patterns_of_all_schemas_of_a_declaration_count_together() {
    let mut budget = CompileBudget::default();
    let long = "x".repeat(20_000);
    let many: serde_json::Map<_, _> = (0..200).map(|n| (format!("p{n}"), json!({}))).collect();
    let schema = json!({"type": "object", "properties": {long: {"properties": many}}});
    let compiled = (0..100)
        .take_while(|_| ArgumentSchema::compile(&schema, &mut budget).is_ok())
        .count();
    assert!((1..100).contains(&compiled));
    let mut budget = CompileBudget::default();
    let pattern = |n: usize| json!({"type": "object", "properties": {"a": {"pattern": format!("^a{n}$")}}});
    let compiled = (0..1000)
        .take_while(|n| ArgumentSchema::compile(&pattern(*n), &mut budget).is_ok())
        .count();
    assert!((100..1000).contains(&compiled));
    // The same pattern again counts once.
    assert!(ArgumentSchema::compile(&pattern(0), &mut budget).is_ok());
}

#[test]
fn ordinary_schemas_mean_what_they_say() {
    let fits = |x: Value, good: Value, bad: Value| {
        let definitions = json!({
            "tree": {"type": "object", "required": ["v"], "properties": {
                "v": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
            "a/b%": {"type": "string", "$anchor": "named"},
        });
        let verdict = check_x(definitions.clone(), x.clone(), good.clone());
        assert_eq!(verdict, ArgumentVerdict::Fit, "{x} should accept {good}");
        let verdict = check_x(definitions, x.clone(), bad.clone());
        assert!(
            matches!(verdict, ArgumentVerdict::Misfit(_)),
            "{x} should refuse {bad}: {verdict:?}"
        );
    };
    fits(json!({"type": "string"}), json!("a"), json!(1));
    fits(
        json!({"enum": ["a", 1, {"b": [1]}]}),
        json!({"b": [1.0]}),
        json!({"b": [2]}),
    );
    fits(json!({"const": [1, 2]}), json!([1, 2]), json!([2, 1]));
    fits(json!({"uniqueItems": true}), json!([1, 2]), json!([1, 1]));
    fits(json!({"minLength": 2, "maxLength": 3}), json!("äöü"), json!("ä"));
    fits(json!({"pattern": "^(?!no)[a-z]+$"}), json!("yes"), json!("none"));
    fits(
        json!({"propertyNames": {"pattern": "^a"}}),
        json!({"ab": 1}),
        json!({"b": 1}),
    );
    fits(
        json!({"patternProperties": {"^a": {"type": "string"}}, "additionalProperties": false}),
        json!({"ab": "x"}),
        json!({"ab": 1}),
    );
    fits(
        json!({"$ref": "#/$defs/tree"}),
        json!({"v": 1, "children": [{"v": 2}]}),
        json!({"v": 1, "children": [{}]}),
    );
    fits(json!({"$ref": "#/$defs/a~1b%25"}), json!("a"), json!(1));
    fits(json!({"$ref": "#named"}), json!("a"), json!(1));
    fits(
        json!({"allOf": [{"properties": {"a": true}}], "unevaluatedProperties": false}),
        json!({"a": 1}),
        json!({"b": 1}),
    );
    fits(
        json!({"oneOf": [{"type": "string"}, {"type": "number", "minimum": 3}]}),
        json!("a"),
        json!(1),
    );
    fits(
        json!({"if": {"type": "string"}, "then": {"minLength": 2}}),
        json!(1),
        json!("a"),
    );
    fits(json!({"not": {"type": "null"}}), json!(1), json!(null));
    fits(
        json!({"items": {"type": "integer"}, "minItems": 1, "type": "array"}),
        json!([1]),
        json!([]),
    );
    fits(
        json!({"contains": {"const": 3}, "maxContains": 1}),
        json!([3]),
        json!([3, 3]),
    );
    fits(
        json!({"dependentSchemas": {"a": {"required": ["b"]}}}),
        json!({"a": 1, "b": 1}),
        json!({"a": 1}),
    );
    fits(
        json!({"$ref": "https://json-schema.org/draft/2020-12/schema"}),
        json!({"type": "string"}),
        json!({"type": 1}),
    );
}

#[test]
fn a_recursive_union_is_checked_and_described() {
    let kinds: Vec<_> = ["and", "or", "plus", "minus"]
        .iter()
        .map(|kind| {
            json!({"type": "object", "properties": {"args": {"items": {"$ref": "#/$defs/e"}}, "op": {"const": kind}},
                "required": ["op"]})
        })
        .chain([json!({"type": "number"})])
        .collect();
    let mut value = json!(1);
    for _ in 0..20 {
        value = json!({"op": "minus", "args": [value, 2]});
    }
    let definitions = json!({"e": {"anyOf": kinds}});
    let x = json!({"$ref": "#/$defs/e"});
    assert_eq!(
        check_x(definitions.clone(), x.clone(), value),
        ArgumentVerdict::Fit
    );
    let misfit = check_x(definitions, x, json!({"op": "times"}));
    let ArgumentVerdict::Misfit(why) = misfit else {
        panic!("{misfit:?}");
    };
    assert!(why.starts_with(" at /x: "), "{why}");
}

#[test]
fn a_check_ends_whatever_the_schema_and_the_arguments() {
    // A list whose items look alike to the library's own hash.
    let mut bracketed: HashSet<String> = ["[]".to_owned()].into();
    for _ in 0..9 {
        bracketed = bracketed
            .iter()
            .flat_map(|list| [format!("[{list}]"), format!("[{list},{list}]")])
            .collect();
    }
    let alike: Value = serde_json::from_str(&format!(
        "[{}]",
        bracketed.into_iter().collect::<Vec<_>>().join(",")
    ))
    .unwrap();
    let mut nested = json!(1);
    for _ in 0..60 {
        nested = json!({"a": nested, "b": nested.get("a").is_some()});
    }
    let twice = json!({"d": {"allOf": [{"properties": {"a": {"$ref": "#/$defs/d"}}},
        {"properties": {"a": {"$ref": "#/$defs/d"}}}, {"unevaluatedProperties": {"$ref": "#/$defs/d"}}]}});
    let long: String = "ab".repeat(1 << 20);
    for (definitions, x, value) in [
        (json!({}), json!({"uniqueItems": true}), alike),
        (
            json!({}),
            json!({"uniqueItems": true}),
            json!((0..400_000).collect::<Vec<_>>()),
        ),
        (
            json!({}),
            json!({"items": {"type": "string"}}),
            json!(vec![1; 500_000]),
        ),
        (
            json!({}),
            json!({"items": {"anyOf": [{"type": "string"}, {"type": "null"}]}}),
            json!(vec![1; 500_000]),
        ),
        (
            json!({}),
            json!({"items": {"allOf": vec![json!({}); 4000]}}),
            json!(vec![1; 500_000]),
        ),
        (
            json!({}),
            json!({"items": {"enum": (0..1000).map(|n| json!([0.5, n])).collect::<Vec<_>>()}}),
            json!(vec![json!([0.5, "x"]); 50_000]),
        ),
        (json!({}), json!({"pattern": "^(a|b)*a(a|b){400}c$"}), json!(long)),
        (json!({}), json!({"pattern": "^(a+)+$"}), json!(long)),
        (
            json!({}),
            json!({"propertyNames": {"pattern": "(a|b)*a(a|b){400}c"}}),
            json!({ long: 1 }),
        ),
        (
            json!({}),
            json!({"patternProperties": {"(a|b)*a(a|b){400}c": {}}}),
            json!({ "ab".repeat(1 << 20): 1 }),
        ),
        (twice, json!({"$ref": "#/$defs/d"}), nested),
    ] {
        let text = x.to_string();
        let begun = std::time::Instant::now();
        let verdict = check_x(definitions, x, value);
        // Printed, not asserted: how long it takes depends on the machine, that it ends does not.
        println!(
            "{:?} for {} ({verdict:?})",
            begun.elapsed(),
            &text[..text.len().min(80)]
        );
        if let ArgumentVerdict::Misfit(why) = verdict {
            assert!(why.len() < 3 * MAX_ERROR_BYTES, "{}", why.len());
        }
    }
}

/// What a check may be charged beyond its limit, in units: once that is reached, each subschema that applies to the value
/// in hand may read it once more.
const MAX_OVERSPENT: i64 = 100_000;

#[test]
fn a_check_ends_at_its_limit_of_work() {
    // Only the last item is wrong, and to come to it takes twice the limit.
    let same = |n: i64| json!(["same", "same", n]);
    let mut compared = vec![same(999); 20_000];
    compared.push(same(-1));
    let mut applied = vec![json!(0); 20_000];
    applied.push(json!("wrong"));
    for (items, value) in [
        (json!({"enum": (0..1000).map(same).collect::<Vec<_>>()}), compared),
        (
            json!({"type": "integer", "allOf": vec![json!({}); 4000]}),
            applied,
        ),
    ] {
        let text = items.to_string();
        let schema = json!({"type": "object", "properties": {"x": {"items": items}}});
        let (verdict, limit, spent) = on_large_stack(|| {
            let compiled = compile(schema).unwrap();
            let verdict = compiled.check(&json!({ "x": value }), CheckEffort::Full);
            let limit = CheckEffort::Full.limits(&compiled.bounds).work;
            (verdict, limit, super::metered::spent())
        });
        assert_eq!(verdict, ArgumentVerdict::Unknown, "{}", &text[..80]);
        assert!(
            (limit + 1..limit + MAX_OVERSPENT).contains(&spent),
            "{spent} units of {limit} for {}",
            &text[..80]
        );
    }
}

#[test]
fn a_schema_is_told_from_other_values_in_bounded_time() {
    let brackets = |n: u32| {
        (0..14).fold(json!([]), |list, bit| match n >> bit & 1 {
            1 => json!([list, []]),
            _ => json!([list]),
        })
    };
    let alike: Vec<_> = (0..3000).map(brackets).collect();
    for good in [
        json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}}),
        json!({"$schema": "http://json-schema.org/draft-07/schema#", "additionalProperties": false}),
        json!({"$schema": "http://json-schema.org/draft-04/schema#", "exclusiveMinimum": true, "minimum": 1}),
        json!({"$schema": "urn:nobody:knows", "type": "object"}),
        doubling("allOf", 60),
    ] {
        assert_eq!(check_schema(&good), Ok(()), "{good}");
    }
    for bad in [
        json!(1),
        json!({"type": "wrong"}),
        json!({"required": [1]}),
        json!({"pattern": "(".repeat(9000)}),
        json!({"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "("}),
    ] {
        let why = check_schema(&bad).unwrap_err();
        assert!(why.len() < 3 * MAX_ERROR_BYTES, "{why}");
    }
    let _ = check_schema(&json!({"$schema": "http://json-schema.org/draft-06/schema#", "enum": alike}));
}

#[test]
fn a_small_check_leaves_large_arguments_undecided() {
    let schema = json!({"type": "object", "properties": {"x": {"items": {"type": "integer"}}}});
    let schema = compile(schema).unwrap();
    let small = json!({"x": [1, 2, 3]});
    assert_eq!(schema.check(&small, CheckEffort::Small), ArgumentVerdict::Fit);
    let large = json!({ "x": vec![1; 200_000] });
    assert_eq!(schema.check(&large, CheckEffort::Small), ArgumentVerdict::Unknown);
    assert_eq!(schema.check(&large, CheckEffort::Full), ArgumentVerdict::Fit);
}
