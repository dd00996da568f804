//! The inner stage alone, for this crate's own tests; users get it as part of `oubliette-client`.

fn main() {
    let mut args = std::env::args_os().skip(1);
    match args.next() {
        Some(command) if command == "sandbox-init" => oubliette_sandbox::inner::main(args),
        _ => std::process::exit(2),
    }
}
