//! The MCP server on stdio that this crate's tests start; with `sandbox-init` as its first argument it is the
//! inner stage of the sandbox instead.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::disallowed_methods
)]

use rmcp::ServiceExt;

#[path = "../tests/upstream_support/server.rs"]
mod server;

fn main() {
    let mut args = std::env::args_os().skip(1);
    match args.next() {
        Some(command) if command == "sandbox-init" => oubliette_sandbox::inner::main(args),
        _ => serve(),
    }
}

fn serve() {
    if let Ok(said) = std::env::var("TOOL_SERVER_SAYS") {
        eprintln!("{said}");
    }
    // Servers that log to stdout exist: a line that is no JSON-RPC message must be ignored.
    println!("a tool server greets its log, which is stdout by mistake");
    if std::env::var_os("TOOL_SERVER_EXITS").is_some() {
        std::process::exit(3);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let service = server::ToolServer::default()
            .serve(rmcp::transport::stdio())
            .await
            .unwrap();
        service.waiting().await.unwrap();
    });
}
