//! `oubliette-client with-http PORT PROGRAM ARG…`: runs an agent that is given its tools over HTTP.
//!
//! This process listens on the port, starts [`crate::http_server`] with the listener as its stdin, and then becomes the
//! program: signals, exit status and output are the agent's own. The server is no child of the agent, which may wait for
//! its children: the process in between ends at once, and the sandbox's first process adopts the server.

use std::{
    ffi::OsString,
    io,
    net::{Ipv4Addr, TcpListener},
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    process::{Command, ExitCode, Stdio},
};

use oubliette_protocol::relay::HTTP_TOKEN_ENV;

/// Exit code when the program cannot be started, as shells use it.
const EXIT_NO_PROGRAM: u8 = 127;

/// Runs the subcommand with the arguments after `with-http`.
pub(crate) fn main(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let port = args.next().and_then(|port| port.to_str()?.parse().ok());
    let (Some(port), Some(program)) = (port, args.next()) else {
        eprintln!("oubliette-client: usage: oubliette-client with-http PORT PROGRAM [ARG…]");
        return ExitCode::from(2);
    };
    if let Err(error) = start_server(port) {
        eprintln!("oubliette-client: the tools cannot be served at 127.0.0.1:{port}: {error}");
        return ExitCode::FAILURE;
    }
    // The token is in the address that the agent is told, and need not be in the environment of all it starts.
    let error = Command::new(&program)
        .args(args)
        .env_remove(HTTP_TOKEN_ENV)
        .exec();
    let program = program.to_string_lossy();
    eprintln!("oubliette-client: {program} could not be started: {error}");
    ExitCode::from(EXIT_NO_PROGRAM)
}

fn start_server(port: u16) -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
    let status = Command::new(std::env::current_exe()?)
        .args(["http-server", "detached"])
        .stdin(OwnedFd::from(listener))
        .stdout(Stdio::null())
        .status()?;
    match status.success() {
        true => Ok(()),
        false => Err(io::Error::other("its process could not be started")),
    }
}

/// Starts `oubliette-client http-server` with this process's stdin, for whoever adopts it.
pub(crate) fn detach() -> ExitCode {
    let started = std::env::current_exe().and_then(|this| {
        Command::new(this)
            .arg("http-server")
            // Its own: a signal to the agent's process group is not meant for it.
            .process_group(0)
            .spawn()
    });
    match started {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("oubliette-client: {error}");
            ExitCode::FAILURE
        }
    }
}
