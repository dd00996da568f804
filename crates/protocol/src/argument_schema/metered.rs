//! A JSON value whose reading is counted, so that a check of it ends after a fixed amount of work.
//!
//! The schema library has no limit on work of its own. Whatever a schema makes it do, it does by reading the value:
//! each read is charged to a budget of the thread, and once that is used up every value reads as null and every list
//! as empty, so that the library has nothing left to go through and returns within a few steps. The result is then
//! ignored.

use std::{
    borrow::Cow,
    cell::Cell,
    hash::{BuildHasher, Hasher, RandomState},
};

use jsonschema::{
    JsonType,
    json::{Array, Json, Node, NodeIdentity, Object, cmp},
};
use serde_json::{Map, Number, Value, map};

/// What one check may do.
#[derive(Debug, Clone, Copy)]
pub(super) struct WorkLimits {
    /// Units of work: reads of a value, weighted by what the library does with them.
    pub(super) work: i64,
    /// Levels of nesting of the value that are read. The library calls itself once for each level of value and schema.
    pub(super) depth: u32,
    /// Units for each value in a list or object: what the library does for it without reading it, and one more.
    pub(super) per_entry: i64,
    /// Units for each byte of a key: the cost of matching keys with the schema's patterns.
    pub(super) per_key_byte: i64,
}

/// What is left of the work that the check running on this thread may do.
#[derive(Clone, Copy)]
struct WorkBudget {
    left: i64,
    limits: WorkLimits,
}

thread_local! {
    // In the thread, not in the value: the library makes values of its own, for keys, with nothing to go by.
    static WORK_BUDGET: Cell<WorkBudget> = const {
        Cell::new(WorkBudget { left: 0, limits: WorkLimits { work: 0, depth: 0, per_entry: 0, per_key_byte: 0 } })
    };
}

/// Runs a check of a value within limits; `None` if it was stopped by them.
pub(super) fn within<T>(
    limits: WorkLimits,
    value: &Value,
    check: impl FnOnce(MeteredValue<'_>) -> T,
) -> Option<T> {
    WORK_BUDGET.set(WorkBudget {
        left: limits.work,
        limits,
    });
    let result = check(MeteredValue { value, depth: 0 });
    (WORK_BUDGET.get().left >= 0).then_some(result)
}

/// Charges units of work. Returns whether there were enough left.
pub(super) fn spend(units: i64) -> bool {
    let mut budget = WORK_BUDGET.get();
    budget.left = budget.left.saturating_sub(units);
    WORK_BUDGET.set(budget);
    budget.left >= 0
}

/// Units that the last check on this thread was charged.
#[cfg(test)]
pub(super) fn spent() -> i64 {
    let budget = WORK_BUDGET.get();
    budget.limits.work.saturating_sub(budget.left)
}

/// Charges for reading text, `per_unit` bytes a unit.
fn spend_text(bytes: usize, per_unit: usize) -> bool {
    spend(1 + (bytes / per_unit) as i64)
}

/// Charges for one more value of a list or object, and its key.
fn spend_entry(key: &str) -> bool {
    let limits = WORK_BUDGET.get().limits;
    spend(
        limits
            .per_entry
            .saturating_add(limits.per_key_byte.saturating_mul(key.len() as i64)),
    )
}

/// The representation that the schema library is given.
pub(super) struct MeteredJson;

impl Json for MeteredJson {
    type Node<'a> = MeteredValue<'a>;
    type PreparedKey = String;
    type StringBuffer = Value;

    fn prepare_key(key: &str) -> String {
        key.to_owned()
    }

    fn with_string_node<T>(buffer: &mut Value, string: &str, f: impl FnOnce(MeteredValue<'_>) -> T) -> T {
        *buffer = Value::String(string.to_owned());
        f(MeteredValue {
            value: buffer,
            depth: 0,
        })
    }
}

/// A value, and how deep it lies in the one that is checked.
#[derive(Clone, Copy)]
pub(super) struct MeteredValue<'a> {
    value: &'a Value,
    depth: u32,
}

impl<'a> MeteredValue<'a> {
    /// The value, if there is work left to look at it.
    fn read(&self) -> &'a Value {
        if spend(1) { self.value } else { &Value::Null }
    }

    /// Whether the values in this one may be read.
    fn opens(&self) -> bool {
        // What lies deeper is not skipped but ends the check: skipping it could turn the result around.
        self.depth < WORK_BUDGET.get().limits.depth || !spend(i64::MAX)
    }
}

impl<'a> Node<'a, MeteredJson> for MeteredValue<'a> {
    type Object = MeteredObject<'a>;
    type Array = MeteredArray<'a>;
    type Number = &'a Number;

    fn as_object(&self) -> Option<MeteredObject<'a>> {
        match self.read() {
            Value::Object(members) if self.opens() => Some(MeteredObject {
                members,
                depth: self.depth + 1,
            }),
            _ => None,
        }
    }

    fn as_array(&self) -> Option<MeteredArray<'a>> {
        match self.read() {
            Value::Array(items) if self.opens() => Some(MeteredArray {
                items,
                depth: self.depth + 1,
            }),
            _ => None,
        }
    }

    fn as_string(&self) -> Option<Cow<'a, str>> {
        match self.value {
            Value::String(text) if spend_text(text.len(), 16) => Some(Cow::Borrowed(text)),
            _ => None,
        }
    }

    fn as_number(&self) -> Option<&'a Number> {
        match self.read() {
            Value::Number(number) => Some(number),
            _ => None,
        }
    }

    fn as_boolean(&self) -> Option<bool> {
        self.read().as_bool()
    }

    fn is_null(&self) -> bool {
        self.read().is_null()
    }

    fn json_type(&self) -> JsonType {
        JsonType::from(self.read())
    }

    fn string_length(&self) -> Option<u64> {
        match self.value {
            Value::String(text) if spend_text(text.len(), 64) => Some(text.chars().count() as u64),
            _ => None,
        }
    }

    fn equals_value(&self, expected: &Value) -> bool {
        equal(self.value, expected)
    }

    fn to_value(&self) -> Cow<'a, Value> {
        Cow::Borrowed(self.value)
    }

    fn identity(&self) -> Option<NodeIdentity> {
        // The library looks it up in a list of the values that it is at, which is as long as they are nested.
        spend(1 + i64::from(self.depth / 8));
        Some(NodeIdentity::new(std::ptr::from_ref(self.value) as usize))
    }
}

pub(super) struct MeteredObject<'a> {
    members: &'a Map<String, Value>,
    depth: u32,
}

impl<'a> Object<'a, MeteredJson> for MeteredObject<'a> {
    type Node = MeteredValue<'a>;
    type MemberName = &'a str;
    type MembersIter = MeteredMembers<'a>;

    fn len(&self) -> usize {
        self.members.len()
    }

    fn get(&self, key: &String) -> Option<MeteredValue<'a>> {
        if !spend(1) {
            return None;
        }
        let value = self.members.get(key)?;
        spend_entry("").then_some(MeteredValue {
            value,
            depth: self.depth,
        })
    }

    fn members(&self) -> MeteredMembers<'a> {
        MeteredMembers {
            members: self.members.iter(),
            depth: self.depth,
        }
    }
}

pub(super) struct MeteredMembers<'a> {
    members: map::Iter<'a>,
    depth: u32,
}

impl<'a> Iterator for MeteredMembers<'a> {
    type Item = (&'a str, MeteredValue<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let (key, value) = self.members.next()?;
        let depth = self.depth;
        spend_entry(key).then_some((key, MeteredValue { value, depth }))
    }
}

pub(super) struct MeteredArray<'a> {
    items: &'a [Value],
    depth: u32,
}

impl<'a> Array<'a, MeteredJson> for MeteredArray<'a> {
    type Node = MeteredValue<'a>;
    type ElementsIter = MeteredElements<'a>;

    fn len(&self) -> usize {
        self.items.len()
    }

    fn elements(&self) -> MeteredElements<'a> {
        MeteredElements {
            items: self.items.iter(),
            depth: self.depth,
        }
    }

    /// Not the library's own: lists like `[0, [0]]` and `[[0], 0]` have the same hash there, so that a list of
    /// ten thousand of them takes fifty million comparisons.
    fn is_unique(&self) -> bool {
        let keys = RandomState::new();
        // Sorted rather than in a table: sixteen bytes for each item, whatever it is.
        let mut hashes = Vec::new();
        for item in self.items {
            let mut hasher = keys.build_hasher();
            if !hash(item, &keys, &mut hasher) {
                return false;
            }
            hashes.push((hasher.finish(), item));
        }
        hashes.sort_unstable_by_key(|(hash, _)| *hash);
        let mut alike = hashes.chunk_by(|(left, _), (right, _)| left == right);
        alike.all(|alike| {
            let mut pairs =
                (1..alike.len()).flat_map(|n| alike[..n].iter().map(move |other| (other.1, alike[n].1)));
            !pairs.any(|(left, right)| equal(left, right))
        })
    }
}

pub(super) struct MeteredElements<'a> {
    items: std::slice::Iter<'a, Value>,
    depth: u32,
}

impl<'a> Iterator for MeteredElements<'a> {
    type Item = MeteredValue<'a>;

    fn next(&mut self) -> Option<MeteredValue<'a>> {
        let value = self.items.next()?;
        let depth = self.depth;
        spend_entry("").then_some(MeteredValue { value, depth })
    }
}

/// Whether two values are equal as JSON Schema has it; false if there is no work left to find out. Both come from
/// the parser, which bounds their depth.
fn equal(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::String(left), Value::String(right)) => {
            left.len() == right.len() && spend_text(left.len(), 64) && left == right
        }
        (Value::Array(left), Value::Array(right)) => {
            spend(1)
                && left.len() == right.len()
                && left.iter().zip(right).all(|(left, right)| equal(left, right))
        }
        (Value::Object(left), Value::Object(right)) => {
            let member = |(key, value)| right.get::<String>(key).is_some_and(|other| equal(value, other));
            spend(1) && left.len() == right.len() && left.iter().all(member)
        }
        _ => spend(1) && cmp::equal(left, right),
    }
}

/// Feeds a value to a hasher such that equal values are alike. Returns whether there was work left for all of it.
fn hash(value: &Value, keys: &RandomState, hasher: &mut impl Hasher) -> bool {
    match value {
        Value::Null => hasher.write_u8(0),
        Value::Bool(value) => hasher.write_u8(1 + u8::from(*value)),
        Value::Number(number) => hash_number(number, hasher),
        Value::String(text) => {
            hasher.write_u8(4);
            hasher.write(text.as_bytes());
            hasher.write_usize(text.len());
            return spend_text(text.len(), 16);
        }
        Value::Array(items) => {
            hasher.write_u8(5);
            hasher.write_usize(items.len());
            return spend(1) && items.iter().all(|item| hash(item, keys, hasher));
        }
        Value::Object(members) => {
            // Added up, since the order of members does not matter. Nobody outside knows the hasher's keys.
            let mut sum = 0_u64;
            for (key, value) in members {
                let mut member = keys.build_hasher();
                member.write(key.as_bytes());
                member.write_usize(key.len());
                if !spend_text(key.len(), 16) || !hash(value, keys, &mut member) {
                    return false;
                }
                sum = sum.wrapping_add(member.finish());
            }
            hasher.write_u8(6);
            hasher.write_usize(members.len());
            hasher.write_u64(sum);
        }
    }
    spend(1)
}

/// Whole numbers are alike however they are written.
fn hash_number(number: &Number, hasher: &mut impl Hasher) {
    let whole = if let Some(number) = number.as_u64() {
        i128::from(number)
    } else if let Some(number) = number.as_i64() {
        i128::from(number)
    } else {
        match number.as_f64() {
            // Every number of this size that is whole fits.
            Some(number) if number.fract() == 0.0 && number.abs() < 1e30 => number as i128,
            other => {
                hasher.write_u8(3);
                return hasher.write_u64(other.map_or(0, f64::to_bits));
            }
        }
    };
    hasher.write_u8(7);
    hasher.write_i128(whole);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const PLENTY: WorkLimits = WorkLimits {
        work: 1_000_000,
        depth: 100,
        per_entry: 1,
        per_key_byte: 0,
    };

    fn unique(items: Value) -> bool {
        within(PLENTY, &items, |items| items.as_array().unwrap().is_unique()).unwrap()
    }

    #[test]
    fn equal_values_are_found_however_they_are_written() {
        for alike in [
            json!([1, 2, 1.0]),
            json!([0, -0.0]),
            json!([{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]),
            json!(["x", "y", "x"]),
            json!([[], [], 1]),
        ] {
            assert!(!unique(alike.clone()), "{alike}");
        }
        for different in [
            json!([1, "1", true, null, [1], {"a": 1}]),
            json!([[0, [0]], [[0], 0], [[0, 0]]]),
            json!([u64::MAX, u64::MAX - 1, -1, 0.5, 1.5]),
            json!([{"a": 1}, {"a": 2}, {"b": 1}, {}]),
            json!(["ab", "a", "b"]),
        ] {
            assert!(unique(different.clone()), "{different}");
        }
    }

    #[test]
    fn a_value_without_work_left_reads_as_null() {
        let value = json!({"a": [1, 2, 3]});
        let limits = WorkLimits { work: 4, ..PLENTY };
        let read = within(limits, &value, |value| {
            let items = value.as_object().unwrap().get(&"a".to_owned()).unwrap();
            assert!(items.as_array().is_some());
            assert_eq!((items.as_array().is_none(), items.is_null()), (true, true));
        });
        assert!(read.is_none());
    }

    #[test]
    fn no_more_is_read_than_there_is_work_for() {
        let value = json!(vec![0; 1000]);
        let limits = WorkLimits { work: 100, ..PLENTY };
        let mut read = 0;
        let checked = within(limits, &value, |value| {
            value.as_array().unwrap().elements().for_each(|_| read += 1);
        });
        // One unit is for the list itself.
        assert_eq!((read, checked), (99, None));
    }

    #[test]
    fn values_nested_too_deep_end_the_check() {
        let value = json!([[[1]]]);
        let limits = WorkLimits { depth: 2, ..PLENTY };
        fn first(value: MeteredValue<'_>) -> Option<MeteredValue<'_>> {
            value.as_array()?.elements().next()
        }
        fn innermost(value: MeteredValue<'_>) -> Option<MeteredValue<'_>> {
            first(value).and_then(first).and_then(first)
        }
        assert!(within(limits, &value, |value| assert!(innermost(value).is_none())).is_none());
        assert!(within(PLENTY, &value, |value| assert!(innermost(value).is_some())).is_some());
    }
}
