//! The other roles of this program, chosen by its first argument: the bare servers that Oubliette is compared
//! with, and the agent and the tool server that Oubliette runs.

mod agent;
mod bare_http;
mod echo;
pub(crate) mod model;

use std::process::ExitCode;

use axum::serve::ListenerExt;

/// Runs the actor that the first argument names, if it names one.
pub(crate) fn run_actor(arguments: &[String]) -> Option<ExitCode> {
    let rest = arguments.get(1..).unwrap_or_default();
    let done = match arguments.first()?.as_str() {
        "as-agent" => agent::run(),
        "as-echo" => echo::serve_stdio(rest),
        "as-echo-http" => echo::serve_http(),
        "as-floor" => bare_http::run(),
        "as-model" => model::run(),
        _ => return None,
    };
    Some(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    })
}

/// Serves a router on a free port, whose address it prints on stdout, until stdin ends.
fn serve_until_stdin_ends(router: impl FnOnce() -> axum::Router) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        let ended = async {
            let mut byte = [0];
            let _ = tokio::io::AsyncReadExt::read(&mut tokio::io::stdin(), &mut byte).await;
        };
        let listener = listener.tap_io(|tcp| drop(tcp.set_nodelay(true)));
        tokio::select! {
            served = axum::serve(listener, router()) => served?,
            () = ended => {}
        }
        anyhow::Ok(())
    })?;
    // The blocking read of stdin may still be running.
    runtime.shutdown_background();
    Ok(())
}
