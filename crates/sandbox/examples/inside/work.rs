//! Ordinary work: printing the environment, echoing, waiting, leaving a daemon behind, filling a disk.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

pub(crate) fn run(command: &str, args: &[String]) -> bool {
    match command {
        "env" => std::env::vars().for_each(|(name, value)| println!("{name}={value}")),
        "cwd" => println!("{}", std::env::current_dir().unwrap_or_default().display()),
        "exit" => std::process::exit(args.first().and_then(|code| code.parse().ok()).unwrap_or(0)),
        "echo" => drop(std::io::copy(&mut std::io::stdin(), &mut std::io::stdout())),
        "ask" => ask(&args[0], &args[1]),
        "wait" => wait(),
        "daemon" => daemon(args),
        "fill" => fill(&args[0]),
        _ => return false,
    }
    true
}

/// Sends a word to a TCP port and prints everything that comes back.
fn ask(address: &str, word: &str) {
    let answer = TcpStream::connect(address).and_then(|mut stream| {
        stream.write_all(word.as_bytes())?;
        stream.shutdown(std::net::Shutdown::Write)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    });
    println!("{answer:?}");
}

/// Prints `waiting` and waits for ever.
fn wait() {
    println!("waiting");
    loop {
        std::thread::park();
    }
}

/// Starts a daemon: a process with a session of its own and without this one's pipes.
#[allow(unsafe_code)]
fn daemon(args: &[String]) {
    let Ok(program) = std::env::current_exe() else {
        return;
    };
    let mut command = std::process::Command::new(program);
    command.arg("wait").args(args);
    command
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped());
    command.stderr(std::process::Stdio::null());
    // SAFETY: setsid is async-signal-safe.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut command, || {
            if libc::setsid() < 0 {
                Err(std::io::Error::last_os_error())
            } else {
                Ok(())
            }
        });
    }
    let mut child = command.spawn().expect("a daemon");
    // It runs once it has printed `waiting`.
    let mut said = [0; 7];
    child
        .stdout
        .take()
        .expect("its stdout")
        .read_exact(&mut said)
        .expect("its word");
    println!("left behind");
    if args.first().is_some_and(|arg| arg == "and-stay") {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// Writes files of 1 MiB until a write fails.
fn fill(directory: &str) {
    for number in 0.. {
        if let Err(error) = std::fs::write(format!("{directory}/{number}"), vec![1; 1 << 20]) {
            println!("{number} then {error}");
            return;
        }
    }
}
