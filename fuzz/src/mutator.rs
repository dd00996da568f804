//! Makes new inputs of old ones: a few random changes each.

use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};

/// The longest input that is made.
const MAX_BYTES: usize = 64 * 1024;

/// Pieces that parsers treat in a way of their own.
const PIECES: &[&[u8]] = &[
    b"{",
    b"}",
    b"[",
    b"]",
    b"\"",
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"null",
    b"true",
    b"-0",
    b"1e999",
    b"9223372036854775808",
    b"0.1",
    b"\n",
    b"\r\n",
    b"\0",
    b"\x7f",
    b"\xff",
    b"\xc3\xa9",
    b"..",
    b"/",
    b"//",
    b"%2e",
    b"*",
    b":",
    b",",
    b" ",
    b"=",
    b"@",
    b"#",
    b"\"$ref\":\"#\"",
    b"\"id\":1",
    b"\"method\":",
    b"\"params\":{}",
    b"\"jsonrpc\":\"2.0\"",
];

/// A source of inputs.
#[derive(Debug)]
pub struct Mutator {
    random: StdRng,
    inputs: Vec<Vec<u8>>,
}

impl Mutator {
    /// A source of inputs made of these. The same seed gives the same inputs.
    pub fn new(seed: u64, mut inputs: Vec<Vec<u8>>) -> Self {
        inputs.push(Vec::new());
        Self {
            random: StdRng::seed_from_u64(seed),
            inputs,
        }
    }

    /// The next input.
    pub fn next_input(&mut self) -> Vec<u8> {
        let mut input = self.any_input().to_vec();
        for _ in 0..self.random.random_range(1..=8) {
            self.change(&mut input);
            input.truncate(MAX_BYTES);
        }
        input
    }

    fn any_input(&mut self) -> &[u8] {
        let at = self.random.random_range(0..self.inputs.len());
        &self.inputs[at]
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.random.random_range(0..=input.len());
        let end = self.random.random_range(at..=input.len().min(at + 64));
        match self.random.random_range(0..9) {
            0 if at < input.len() => input[at] ^= 1 << self.random.random_range(0..8),
            1 if at < input.len() => input[at] = self.random.next_u32() as u8,
            2 => drop(input.drain(at..end)),
            3 => {
                let piece = PIECES[self.random.random_range(0..PIECES.len())];
                input.splice(at..at, piece.iter().copied());
            }
            4 => {
                let piece = PIECES[self.random.random_range(0..PIECES.len())];
                input.splice(at..end, piece.iter().copied());
            }
            // Repeated, up to what a recursive parser would take a stack frame for each of.
            5 => {
                let piece = input[at..end].to_vec();
                let times = 1 << self.random.random_range(0..14);
                let times = times.min(MAX_BYTES / piece.len().max(1));
                input.splice(at..at, piece.repeat(times));
            }
            6 => {
                let other = self.any_input().to_vec();
                let from = self.random.random_range(0..=other.len());
                let to = self.random.random_range(from..=other.len());
                input.splice(at..end, other[from..to].iter().copied());
            }
            7 => {
                let moved: Vec<u8> = input.drain(at..end).collect();
                let to = self.random.random_range(0..=input.len());
                input.splice(to..to, moved);
            }
            _ => {
                let length = self.random.random_range(0..16);
                let bytes: Vec<u8> = (0..length).map(|_| self.random.next_u32() as u8).collect();
                input.splice(at..at, bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_inputs_and_none_is_too_long() {
        let inputs = || vec![b"{\"a\":1}".to_vec(), vec![b'['; MAX_BYTES]];
        let (mut one, mut other) = (Mutator::new(7, inputs()), Mutator::new(7, inputs()));
        for _ in 0..1000 {
            let input = one.next_input();
            assert!(input.len() <= MAX_BYTES);
            assert_eq!(input, other.next_input());
        }
    }
}
