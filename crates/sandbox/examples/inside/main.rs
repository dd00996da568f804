//! The program that this crate's tests run inside sandboxes. It contains the inner stage and the remote stage (users
//! get them as part of `oubliette-client`), escape attempts, and ordinary work.
//!
//! An escape attempt prints one line, `name: ok` or `name: <errno's name>`, for each thing it tries; the tests decide
//! which result is right.

#![allow(clippy::disallowed_methods, clippy::zombie_processes)]

mod attempts;
mod hold;
mod work;

fn main() {
    let mut args = std::env::args_os().skip(1);
    let command = args.next().unwrap_or_default().into_string().unwrap_or_default();
    if command == "sandbox-init" {
        oubliette_sandbox::inner::main(args);
    }
    if command == "remote-stage" {
        oubliette_sandbox::stage::container::main(args);
    }
    let args: Vec<String> = args.map(|arg| arg.to_string_lossy().into_owned()).collect();
    let known = attempts::run(&command, &args) || work::run(&command, &args) || hold::run(&command, &args);
    if !known {
        eprintln!("no such command: {command}");
        std::process::exit(2);
    }
}
