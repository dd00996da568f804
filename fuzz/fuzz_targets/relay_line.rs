//! A line of the relay socket: never a panic, and what is accepted survives being written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| oubliette_relay::fuzz_line(bytes));
