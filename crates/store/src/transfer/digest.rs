//! The count and hash of a table's rows.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::shape::TableShape;

/// The count of rows and the sum of their SHA-256 hashes, modulo 2^256. A sum does not depend on the order, which differs
/// between two databases that hold the same rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RowDigest {
    rows: u64,
    sum: [u64; 4],
}

impl RowDigest {
    /// Adds a row: its line without the newline.
    pub fn add(&mut self, line: &[u8]) {
        self.add_hash(&Sha256::digest(line).into());
    }

    /// Adds something whose SHA-256 hash this is.
    pub fn add_hash(&mut self, hash: &[u8; 32]) {
        self.rows += 1;
        let mut carry = 0;
        for (sum, part) in self.sum.iter_mut().zip(hash.as_chunks::<8>().0) {
            let total = u128::from(*sum) + u128::from(u64::from_le_bytes(*part)) + carry;
            *sum = total as u64;
            carry = total >> 64;
        }
    }

    /// How many were added.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The sum as hexadecimal digits.
    pub fn to_hex(&self) -> String {
        let bytes: Vec<u8> = self.sum.iter().flat_map(|part| part.to_le_bytes()).collect();
        hex::encode(bytes)
    }
}

/// A table, how many rows it has, and their hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableDigest {
    /// Its name and columns.
    pub table: TableShape,
    /// How many rows it has.
    pub rows: u64,
    /// The sum of the rows' SHA-256 hashes, modulo 2^256, little-endian, as hexadecimal digits.
    pub sha256: String,
}

impl TableDigest {
    /// Of a table whose rows were added to a digest.
    pub fn new(table: TableShape, digest: &RowDigest) -> Self {
        Self {
            table,
            rows: digest.rows(),
            sha256: digest.to_hex(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(lines: &[&str]) -> RowDigest {
        let mut digest = RowDigest::default();
        lines.iter().for_each(|line| digest.add(line.as_bytes()));
        digest
    }

    #[test]
    fn the_order_does_not_count_and_everything_else_does() {
        assert_eq!(digest(&["a", "b", "c"]), digest(&["c", "a", "b"]));
        assert_eq!(digest(&[]).to_hex(), "0".repeat(64));
        for other in [
            &["a", "b"][..],
            &["a", "b", "d"],
            &["a", "b", "c", "c"],
            &["ab", "c"],
        ] {
            assert_ne!(digest(&["a", "b", "c"]), digest(other), "{other:?}");
        }
    }

    #[test]
    fn a_sum_carries_into_its_next_part() {
        let mut digest = RowDigest::default();
        digest.add_hash(&[0xff; 32]);
        let mut one = [0; 32];
        one[0] = 1;
        digest.add_hash(&one);
        assert_eq!(digest.to_hex(), "0".repeat(64));
    }
}
