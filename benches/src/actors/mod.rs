//! What this program is when it is started as something else: the bare things that ours is measured against,
//! and the agent and tool server that ours runs.

mod agent;
mod echo;
mod floor;

use std::process::ExitCode;

use axum::serve::ListenerExt;

/// Plays a part, if the first argument names one.
pub(crate) fn play(arguments: &[String]) -> Option<ExitCode> {
    let rest = arguments.get(1..).unwrap_or_default();
    let done = match arguments.first()?.as_str() {
        "as-agent" => agent::run(),
        "as-echo" => echo::stdio(rest),
        "as-echo-http" => echo::http(),
        "as-floor" => floor::run(),
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

/// Serves a router on a port of its own, said on stdout, until stdin ends.
fn serve(router: impl FnOnce() -> axum::Router) -> anyhow::Result<()> {
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
    // The read of stdin may still block.
    runtime.shutdown_background();
    Ok(())
}
