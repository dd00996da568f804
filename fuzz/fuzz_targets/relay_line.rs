//! A line of the relay socket: parsing never panics, and a message that parses is the same after being written and
//! read again.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| oubliette_relay::fuzz_line(bytes));
