//! How many bytes the server may keep on behalf of somebody else: lines that are not complete, arguments of calls that
//! wait, answers that nobody has read.
//!
//! Each session has a budget within one of the whole server. What is kept is charged to the session it is kept for, and
//! what does not fit is refused with `limit_exceeded`. Part of each budget is reserved for small amounts, so that a session
//! full of large ones can still make ordinary calls, and sessions that keep much do not take the server from those that
//! keep little.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use serde_json::Value;

use crate::{Error, JsonObject};

/// What every waiting call is charged besides its bytes, for the memory that serving it takes.
pub const CALL_OVERHEAD: usize = 4 * 1024;
/// Amounts up to this, in bytes, are covered by [`CALL_OVERHEAD`] and not charged again on the call's way.
pub const UNCHARGED: usize = 4 * 1024;

/// What a call is charged that has this many bytes of arguments, or of a result.
pub fn call_bytes(bytes: usize) -> usize {
    match bytes > UNCHARGED {
        true => CALL_OVERHEAD.saturating_add(bytes),
        false => CALL_OVERHEAD,
    }
}

/// A charge up to this size may use all of its own budget; the reserve of a budget is an eighth.
const SMALL_CHARGE: usize = 64 * 1024;
/// A budget that uses no more than this may use all of the budget it is part of; the reserve is a quarter.
const SMALL_BUDGET: usize = 1024 * 1024;

/// A budget of bytes. Clones share it.
#[derive(Debug, Clone)]
pub struct ByteBudget(Arc<BudgetState>);

#[derive(Debug)]
struct BudgetState {
    /// The setting that its limit comes from, for error texts.
    setting: &'static str,
    limit: usize,
    used: AtomicUsize,
    /// The budget it is part of.
    parent: Option<ByteBudget>,
}

/// There is no room left in a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{bytes} bytes do not fit into what may be kept in memory ({limit} bytes, [limits] {setting}, less a reserve for small \
     messages); read the answers that wait, or send less at once"
)]
pub struct OverBudget {
    bytes: usize,
    limit: usize,
    setting: &'static str,
}

impl From<OverBudget> for Error {
    fn from(over: OverBudget) -> Self {
        Error::limit_exceeded(over.to_string())
    }
}

impl Default for ByteBudget {
    /// A budget without a limit.
    fn default() -> Self {
        Self::new("none", usize::MAX)
    }
}

impl ByteBudget {
    /// A budget of its own. `setting` names the setting of `[limits]` that the limit comes from.
    pub fn new(setting: &'static str, limit: usize) -> Self {
        Self::make(setting, limit, None)
    }

    /// A budget within this one: what is charged to it is charged to both.
    #[must_use]
    pub fn part(&self, setting: &'static str, limit: usize) -> Self {
        Self::make(setting, limit, Some(self.clone()))
    }

    fn make(setting: &'static str, limit: usize, parent: Option<Self>) -> Self {
        Self(Arc::new(BudgetState {
            setting,
            limit,
            used: AtomicUsize::new(0),
            parent,
        }))
    }

    /// Charges bytes until the charge is dropped.
    pub fn charge(&self, bytes: usize) -> Result<ByteCharge, OverBudget> {
        let mut charge = self.empty_charge();
        charge.resize(bytes)?;
        Ok(charge)
    }

    /// A charge of nothing yet.
    pub fn empty_charge(&self) -> ByteCharge {
        ByteCharge {
            budget: self.clone(),
            bytes: 0,
        }
    }

    /// How many bytes are charged now.
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Adds bytes to a charge that then has `total`.
    fn add(&self, bytes: usize, total: usize) -> Result<(), OverBudget> {
        let most = match total <= SMALL_CHARGE {
            true => self.0.limit,
            false => self.0.limit - self.0.limit / 8,
        };
        let used = self.0.take(bytes, most)?;
        if let Some(parent) = &self.0.parent {
            let limit = parent.0.limit;
            let most = if used <= SMALL_BUDGET {
                limit
            } else {
                limit - limit / 4
            };
            if let Err(over) = parent.0.take(bytes, most) {
                self.0.used.fetch_sub(bytes, Ordering::Relaxed);
                return Err(over);
            }
        }
        Ok(())
    }

    fn release(&self, bytes: usize) {
        self.0.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(parent) = &self.0.parent {
            parent.0.used.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

impl BudgetState {
    /// Takes bytes if no more than `most` are used then; returns how many are. An attempt that fails is never visible
    /// to others.
    fn take(&self, bytes: usize, most: usize) -> Result<usize, OverBudget> {
        let add = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= most);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(before) => Ok(before + bytes),
            Err(_) => Err(OverBudget {
                bytes,
                limit: self.limit,
                setting: self.setting,
            }),
        }
    }
}

/// Bytes charged to a budget, given back when dropped.
#[derive(Debug)]
pub struct ByteCharge {
    budget: ByteBudget,
    bytes: usize,
}

impl ByteCharge {
    /// Charges `bytes` instead of what is charged now. If they do not fit, nothing changes.
    pub fn resize(&mut self, bytes: usize) -> Result<(), OverBudget> {
        match bytes.checked_sub(self.bytes) {
            Some(0) => {}
            Some(more) => self.budget.add(more, bytes)?,
            None => self.budget.release(self.bytes - bytes),
        }
        self.bytes = bytes;
        Ok(())
    }

    /// How many bytes are charged.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for ByteCharge {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.budget.release(self.bytes);
        }
    }
}

/// The size of a value in a list or object, without what it refers to.
const VALUE_BYTES: usize = size_of::<Value>();
/// A key with its hash and allocation.
const KEY_BYTES: usize = 96;

/// About how many bytes the members of an object take in memory.
pub fn object_bytes(members: &JsonObject) -> usize {
    fn bytes(value: &Value) -> usize {
        match value {
            Value::String(text) => VALUE_BYTES + text.len(),
            Value::Array(items) => VALUE_BYTES + items.iter().map(bytes).sum::<usize>(),
            Value::Object(members) => VALUE_BYTES + object_bytes(members),
            _ => VALUE_BYTES,
        }
    }
    let member = |(key, value): (&String, &Value)| KEY_BYTES + key.len() + bytes(value);
    members.iter().map(member).sum()
}

/// About how many bytes a JSON text takes once it is parsed: its own length, and what each value and key needs besides.
/// A text of many small values takes many times its length.
pub fn parsed_bytes(text: &[u8]) -> usize {
    /// Shorter texts are not looked through: [`CALL_OVERHEAD`] covers what they take.
    const SHORT: usize = 512;
    if text.len() <= SHORT {
        return text.len();
    }
    let (mut values, mut keys, mut at) = (0, 0, 0);
    while let Some(byte) = text.get(at) {
        match byte {
            b'"' => at = end_of_string(text, at + 1),
            b',' | b'[' | b'{' => values += 1,
            b':' => keys += 1,
            _ => {}
        }
        at += 1;
    }
    text.len()
        .saturating_add(values * VALUE_BYTES)
        .saturating_add(keys * KEY_BYTES)
}

/// Where the string ends that begins at `at`, after its quote.
fn end_of_string(bytes: &[u8], mut at: usize) -> usize {
    while let Some(found) = memchr::memchr2(b'"', b'\\', bytes.get(at..).unwrap_or_default()) {
        at += found;
        if bytes[at] == b'"' {
            return at;
        }
        at += 2;
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1024 * 1024;

    #[test]
    fn a_charge_is_given_back_to_every_budget_when_dropped() {
        let server = ByteBudget::new("server_buffer_mb", 100 * MIB);
        let session = server.part("session_buffer_mb", 10 * MIB);
        let mut charge = session.charge(5 * MIB).unwrap();
        assert_eq!((session.used(), server.used()), (5 * MIB, 5 * MIB));
        charge.resize(8 * MIB).unwrap();
        assert!(charge.resize(20 * MIB).is_err());
        assert_eq!((session.used(), server.used()), (8 * MIB, 8 * MIB));
        charge.resize(MIB).unwrap();
        assert_eq!((session.used(), server.used()), (MIB, MIB));
        drop(charge);
        assert_eq!((session.used(), server.used()), (0, 0));
    }

    #[test]
    fn large_charges_leave_room_for_small_ones() {
        let session = ByteBudget::new("session_buffer_mb", 64 * MIB);
        let mut large = Vec::new();
        while let Ok(charge) = session.charge(MIB) {
            large.push(charge);
        }
        assert_eq!(large.len(), 56);
        assert!(session.charge(SMALL_CHARGE).is_ok());
    }

    #[test]
    fn sessions_that_keep_much_leave_room_for_those_that_keep_little() {
        let server = ByteBudget::new("server_buffer_mb", 100 * MIB);
        let hoarders: Vec<_> = (0..8)
            .map(|_| server.part("session_buffer_mb", 64 * MIB))
            .collect();
        let mut kept = Vec::new();
        for hoarder in &hoarders {
            while let Ok(charge) = hoarder.charge(64 * 1024) {
                kept.push(charge);
            }
        }
        // Each may keep a little beyond the common part.
        assert!(server.used() <= 75 * MIB + hoarders.len() * SMALL_BUDGET);
        let other = server.part("session_buffer_mb", 64 * MIB);
        assert!(other.charge(MIB).is_ok());
        let over = other.charge(30 * MIB).unwrap_err();
        assert!(over.to_string().contains("server_buffer_mb"), "{over}");
        assert_eq!(other.used(), 0);
    }

    #[test]
    fn many_threads_never_exceed_a_budget() {
        let budget = ByteBudget::new("session_buffer_mb", 1000);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for bytes in 0..2000 {
                        if let Ok(charge) = budget.charge(bytes) {
                            assert!(budget.used() <= 1000 && charge.bytes() == bytes);
                        }
                    }
                });
            }
        });
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn what_parsing_takes_is_not_underestimated() {
        let text = format!("\"{}\"", "a,[{:\\\"".repeat(1000));
        assert_eq!(parsed_bytes(text.as_bytes()), text.len());
        let many = format!("[{}0]", "0,".repeat(1_000_000));
        assert!(parsed_bytes(many.as_bytes()) > 32 * 1_000_000);
        let keys = format!("{{{}\"z\":0}}", "\"a\":0,".repeat(10_000));
        assert!(parsed_bytes(keys.as_bytes()) > 100 * 10_000);
        assert_eq!(parsed_bytes(b"{}"), 2);
        for odd in ["\"\\", "\"", "\\"] {
            parsed_bytes(odd.repeat(400).as_bytes());
        }
    }
}
