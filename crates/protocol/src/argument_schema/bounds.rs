//! What a schema can make the schema library do, found out before the library sees it.
//!
//! A schema is a graph: a subschema applies others to the same value (`allOf`, `anyOf`, `$ref`, …) or to the values in
//! it (`properties`, `items`, …). The library goes through it as if every reference were replaced by what it refers to,
//! so a kilobyte of references to references can stand for more subschemas than there is memory or time. Here each
//! subschema is looked at once, and what it stands for is counted.

use std::{collections::HashMap, sync::Arc};

use serde_json::Value;

use super::{
    CompileBudget,
    pattern::{CompiledPattern, PatternSet},
};

/// Maximum nesting of a schema's JSON. The library calls itself for each level.
const MAX_JSON_DEPTH: usize = 64;
/// Maximum length of a chain of subschemas that apply to the same value, references included.
const MAX_CHAIN: usize = 32;
/// Maximum number of subschemas that apply to the same value.
const MAX_APPLIED: u64 = 4096;
/// Maximum number of subschemas of one schema, each counted once.
const MAX_SUBSCHEMAS: usize = 10_000;
/// Maximum number of subschemas the library compiles for one schema: those that several references overlap in are
/// compiled for each, and `unevaluatedProperties` and `unevaluatedItems` compile everything that applies with them.
const MAX_COMPILED: u64 = 40_000;
/// Maximum number of values of an `enum` that are lists or objects. Some drafts want them to be different, which the
/// library finds out by comparing each with each.
const MAX_COMPOUND_VALUES: usize = 1000;

/// Keywords that apply one subschema to the same value.
const SAME_VALUE: [&str; 4] = ["not", "if", "then", "else"];
/// Keywords that apply a list of subschemas to the same value.
const SAME_VALUE_LISTS: [&str; 3] = ["allOf", "anyOf", "oneOf"];
/// Keywords that apply a map of subschemas to the same value.
const SAME_VALUE_MAPS: [&str; 2] = ["dependentSchemas", "dependencies"];
/// Keywords that apply a subschema, or a list of them, to the values in it.
const INNER_VALUES: [&str; 9] = [
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "contentSchema",
];
/// Keywords that apply a map of subschemas to the values in it.
const INNER_VALUE_MAPS: [&str; 2] = ["properties", "patternProperties"];
/// Keywords that refer to a subschema, which applies to the same value.
const REFERENCES: [&str; 3] = ["$ref", "$dynamicRef", "$recursiveRef"];
/// Keywords that read the value they are about, whatever it is.
const READING: [&str; 5] = ["type", "enum", "const", "pattern", "required"];

/// What one check of a value by a schema can take.
#[derive(Debug, Clone, Copy)]
pub(super) struct SchemaBounds {
    /// The longest chain of subschemas that apply to the same value.
    pub(super) chain: u32,
    /// Most subschemas that apply to one value without reading it.
    pub(super) unread: i64,
    /// Units of work for each byte of a key, for `patternProperties`.
    pub(super) per_key_byte: i64,
}

impl SchemaBounds {
    /// Finds the bounds of a schema, and compiles its patterns; an error says which bound it exceeds.
    pub(super) fn of(schema: &Value, budget: &mut CompileBudget) -> Result<(Self, PatternSet), String> {
        check_depth(schema, MAX_JSON_DEPTH)?;
        let mut graph = SchemaGraph::new(schema, budget);
        let root = graph.node(schema, 0)?;
        while let Some((index, value, path)) = graph.unread.pop() {
            graph.read(index, value, path)?;
        }
        graph.bounds(root)
    }
}

/// Refuses JSON that is nested too deep. Calls itself at most that often.
fn check_depth(value: &Value, left: usize) -> Result<(), String> {
    if left == 0 {
        return Err(format!("is nested deeper than {MAX_JSON_DEPTH} levels"));
    }
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| check_depth(item, left - 1)),
        Value::Object(members) => members.values().try_for_each(|item| check_depth(item, left - 1)),
        _ => Ok(()),
    }
}

/// A schema's subschemas, and which apply which.
struct SchemaGraph<'a, 'b> {
    root: &'a Value,
    budget: &'b mut CompileBudget,
    nodes: Vec<Subschema>,
    by_address: HashMap<*const Value, usize>,
    anchors: Option<HashMap<&'a str, &'a Value>>,
    /// Subschemas of which the keywords are not read yet, with the length of their paths.
    unread: Vec<(usize, &'a Value, usize)>,
    patterns: PatternSet,
    per_key_byte: i64,
}

#[derive(Default)]
struct Subschema {
    /// Those applied to the same value, references last.
    same_value: Vec<usize>,
    /// How many of them are references.
    references: usize,
    inner_values: Vec<usize>,
    reads_value: bool,
    unevaluated: bool,
}

/// What applying a subschema to one value takes.
#[derive(Clone, Copy)]
struct SubschemaCost {
    chain: usize,
    subschemas: u64,
    unread: u64,
}

impl<'a, 'b> SchemaGraph<'a, 'b> {
    fn new(root: &'a Value, budget: &'b mut CompileBudget) -> Self {
        Self {
            root,
            budget,
            nodes: Vec::new(),
            by_address: HashMap::new(),
            anchors: None,
            unread: Vec::new(),
            patterns: PatternSet::new(),
            per_key_byte: 0,
        }
    }

    /// The subschema at a place, entered once however often it is applied.
    fn node(&mut self, value: &'a Value, path: usize) -> Result<usize, String> {
        if let Some(index) = self.by_address.get(&std::ptr::from_ref(value)) {
            return Ok(*index);
        }
        if self.nodes.len() == MAX_SUBSCHEMAS {
            return Err(format!("has more than {MAX_SUBSCHEMAS} subschemas"));
        }
        self.budget.charge_subschema()?;
        let index = self.nodes.len();
        self.nodes.push(Subschema::default());
        self.by_address.insert(value, index);
        self.unread.push((index, value, path));
        Ok(index)
    }

    /// Reads the keywords of a subschema. Those of every draft are taken for keywords, which only counts too much.
    fn read(&mut self, index: usize, value: &'a Value, path: usize) -> Result<(), String> {
        let Value::Object(keywords) = value else {
            return Ok(());
        };
        // The library keeps the whole path with each keyword.
        self.budget.charge_paths((path + 32) * (1 + keywords.len()))?;
        if !std::ptr::eq(value, self.root) {
            for own_document in ["$id", "id", "$schema"] {
                let text = keywords.get(own_document).and_then(Value::as_str);
                if text.is_some_and(|text| own_document == "$schema" || !text.starts_with('#')) {
                    return Err(format!(
                        "has a {own_document:?} below its root, which is not supported"
                    ));
                }
            }
        }
        let mut same_value = Vec::new();
        let mut inner_values = Vec::new();
        for (keyword, applied) in keywords {
            let (keyword, path) = (keyword.as_str(), path + keyword.len() + 1);
            match applied {
                Value::Array(list) if SAME_VALUE_LISTS.contains(&keyword) => {
                    self.add_list(list, path, &mut same_value)?;
                }
                Value::Array(list) if INNER_VALUES.contains(&keyword) => {
                    self.add_list(list, path, &mut inner_values)?;
                }
                Value::Object(map) if SAME_VALUE_MAPS.contains(&keyword) => {
                    self.add_map(map, path, &mut same_value)?;
                }
                Value::Object(map) if INNER_VALUE_MAPS.contains(&keyword) => {
                    self.add_map(map, path, &mut inner_values)?;
                    if keyword == "patternProperties" {
                        for pattern in map.keys() {
                            let pattern = self.add_pattern(pattern)?;
                            self.per_key_byte = self.per_key_byte.saturating_add(pattern.cost_per_byte());
                        }
                    }
                }
                Value::Object(_) | Value::Bool(_) if SAME_VALUE.contains(&keyword) => {
                    same_value.push(self.node(applied, path)?);
                }
                Value::Object(_) | Value::Bool(_) if INNER_VALUES.contains(&keyword) => {
                    inner_values.push(self.node(applied, path)?);
                }
                Value::String(pattern) if keyword == "pattern" => {
                    self.add_pattern(pattern)?;
                }
                Value::Array(values) if keyword == "enum" => {
                    let compound = values
                        .iter()
                        .filter(|value| value.is_array() || value.is_object());
                    if compound.count() > MAX_COMPOUND_VALUES {
                        return Err(format!(
                            "has more than {MAX_COMPOUND_VALUES} lists or objects in an enum"
                        ));
                    }
                }
                _ => {}
            }
        }
        let own = same_value.len();
        for keyword in REFERENCES {
            if let Some(reference) = keywords.get(keyword).and_then(Value::as_str)
                && let Some(target) = self.resolve(reference)?
            {
                same_value.push(self.node(target, reference.len())?);
            }
        }
        let node = &mut self.nodes[index];
        node.references = same_value.len() - own;
        node.same_value = same_value;
        node.inner_values = inner_values;
        node.unevaluated = ["unevaluatedProperties", "unevaluatedItems"]
            .iter()
            .any(|keyword| keywords.contains_key(*keyword));
        node.reads_value = READING.iter().any(|keyword| match keywords.get(*keyword) {
            Some(Value::Array(list)) => !list.is_empty(),
            found => found.is_some(),
        });
        Ok(())
    }

    fn add_list(&mut self, list: &'a [Value], path: usize, to: &mut Vec<usize>) -> Result<(), String> {
        list.iter().try_for_each(|value| {
            to.push(self.node(value, path + 8)?);
            Ok(())
        })
    }

    fn add_map(
        &mut self,
        map: &'a serde_json::Map<String, Value>,
        path: usize,
        to: &mut Vec<usize>,
    ) -> Result<(), String> {
        // Lists are names that `dependencies` requires.
        let subschemas = map.iter().filter(|(_, value)| !value.is_array());
        for (key, value) in subschemas {
            to.push(self.node(value, path + key.len() + 1)?);
        }
        Ok(())
    }

    fn add_pattern(&mut self, pattern: &str) -> Result<Arc<CompiledPattern>, String> {
        let compiled = self.budget.patterns.add(pattern)?;
        self.patterns.insert(pattern.to_owned(), compiled.clone());
        Ok(compiled)
    }

    /// What a reference refers to; nothing if it is one of the schemas of JSON Schema itself, which the library has.
    fn resolve(&mut self, reference: &str) -> Result<Option<&'a Value>, String> {
        let unknown = || format!("refers to {}, which is not in it", crate::id::quoted(reference));
        let own_id = ["$id", "id"]
            .iter()
            .find_map(|key| self.root.get(key)?.as_str())
            .map(|id| id.trim_end_matches('#'));
        let (document, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        if !document.is_empty() && Some(document) != own_id {
            let of_json_schema = ["http://json-schema.org/draft-0", "https://json-schema.org/draft/"];
            if !of_json_schema.iter().any(|known| document.starts_with(known)) {
                return Err(unknown());
            }
            // Their own references are redirected by such an anchor.
            if self.anchors()?.contains_key("") {
                return Err("refers to a schema of JSON Schema and has a dynamic anchor".into());
            }
            return Ok(None);
        }
        let fragment = decode_percent(fragment).ok_or_else(unknown)?;
        let target = match fragment.strip_prefix('/') {
            None if fragment.is_empty() => Some(self.root),
            None => self.anchors()?.get(fragment.as_str()).copied(),
            Some(_) => self.root.pointer(&fragment),
        };
        target.map(Some).ok_or_else(unknown)
    }

    /// The values that have a name of their own, and under "" one with a dynamic name.
    fn anchors(&mut self) -> Result<&HashMap<&'a str, &'a Value>, String> {
        if self.anchors.is_none() {
            let mut found = HashMap::new();
            find_anchors(self.root, &mut found)?;
            self.anchors = Some(found);
        }
        self.anchors.as_ref().ok_or_else(String::new)
    }

    fn bounds(self, root: usize) -> Result<(SchemaBounds, PatternSet), String> {
        let mut applied = vec![None; self.nodes.len()];
        let mut sizes = vec![None; self.nodes.len()];
        let mut targets = vec![false; self.nodes.len()];
        targets[root] = true;
        for node in &self.nodes {
            let own = node.same_value.len() - node.references;
            node.same_value[own..]
                .iter()
                .for_each(|target| targets[*target] = true);
        }
        let (mut chain, mut unread, mut compiled) = (0, 0, 0_u64);
        for (index, is_target) in targets.into_iter().enumerate() {
            let found = self.applied(index, MAX_CHAIN, &mut applied)?;
            chain = chain.max(found.chain);
            unread = unread.max(found.unread);
            if is_target {
                compiled = compiled.saturating_add(self.size(index, &mut sizes));
            }
            if self.nodes[index].unevaluated {
                compiled = compiled.saturating_add(found.subschemas);
            }
        }
        if compiled > MAX_COMPILED {
            return Err(format!(
                "stands for more than {MAX_COMPILED} subschemas: its references overlap too often"
            ));
        }
        let bounds = SchemaBounds {
            chain: chain as u32,
            unread: unread as i64,
            per_key_byte: self.per_key_byte,
        };
        Ok((bounds, self.patterns))
    }

    /// What applying a subschema to one value takes, found once for each. Calls itself at most `left` times.
    fn applied(
        &self,
        index: usize,
        left: usize,
        found: &mut Vec<Option<SubschemaCost>>,
    ) -> Result<SubschemaCost, String> {
        let too_long = || {
            format!(
                "has references that lead back to themselves, or more than {MAX_CHAIN} of them and of combinations such \
                 as allOf in each other"
            )
        };
        if let Some(applied) = found[index] {
            return if applied.chain <= left {
                Ok(applied)
            } else {
                Err(too_long())
            };
        }
        let left = left.checked_sub(1).ok_or_else(too_long)?;
        let node = &self.nodes[index];
        let is_leaf = node.same_value.is_empty();
        let mut sum = SubschemaCost {
            chain: 0,
            subschemas: 1,
            unread: u64::from(is_leaf && !node.reads_value),
        };
        for target in &node.same_value {
            let applied = self.applied(*target, left, found)?;
            sum.chain = sum.chain.max(applied.chain);
            sum.subschemas = sum.subschemas.saturating_add(applied.subschemas);
            sum.unread = sum.unread.saturating_add(applied.unread);
        }
        sum.chain += 1;
        if sum.subschemas > MAX_APPLIED {
            return Err(format!(
                "applies more than {MAX_APPLIED} subschemas to one value, counting each as often as it is referred to"
            ));
        }
        found[index] = Some(sum);
        Ok(sum)
    }

    /// How many subschemas there are in one, without following references. Calls itself as deep as JSON is nested.
    fn size(&self, index: usize, found: &mut Vec<Option<u64>>) -> u64 {
        if let Some(size) = found[index] {
            return size;
        }
        let node = &self.nodes[index];
        let own = &node.same_value[..node.same_value.len() - node.references];
        let inner = own
            .iter()
            .chain(&node.inner_values)
            .map(|inner| self.size(*inner, found));
        let size = inner.fold(1, u64::saturating_add);
        found[index] = Some(size);
        size
    }
}

/// Enters every named value. Calls itself as deep as JSON is nested.
fn find_anchors<'a>(value: &'a Value, found: &mut HashMap<&'a str, &'a Value>) -> Result<(), String> {
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| find_anchors(item, found)),
        Value::Object(members) => {
            for keyword in ["$anchor", "$dynamicAnchor", "$id", "id"] {
                let name = members.get(keyword).and_then(Value::as_str);
                let name = if keyword.ends_with("id") {
                    name.and_then(|id| id.strip_prefix('#'))
                } else {
                    name
                };
                if let Some(name) = name.filter(|name| !name.is_empty())
                    && found
                        .insert(name, value)
                        .is_some_and(|other| !std::ptr::eq(other, value))
                {
                    return Err(format!("has two subschemas named {}", crate::id::quoted(name)));
                }
            }
            if members.contains_key("$dynamicAnchor") || members.contains_key("$recursiveAnchor") {
                found.insert("", value);
            }
            members.values().try_for_each(|item| find_anchors(item, found))
        }
        _ => Ok(()),
    }
}

/// Replaces `%41` and the like.
fn decode_percent(text: &str) -> Option<String> {
    if !text.contains('%') {
        return Some(text.to_owned());
    }
    let mut decoded = Vec::with_capacity(text.len());
    let mut parts = text.split('%');
    decoded.extend_from_slice(parts.next()?.as_bytes());
    for part in parts {
        decoded.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        decoded.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(decoded).ok()
}
