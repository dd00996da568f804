//! The MCP proxies under comparison: Oubliette, and the peers as published on crates.io and npm.

use std::{
    cell::Cell,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::{
    home::{BenchHome, BenchServer, free_address, own_program},
    mcp::{BenchMcpRevision, McpHttpClient},
    procs,
};

/// A proxy that offers the echo server's tool over MCP on HTTP.
pub(super) struct McpProxy {
    pub(super) name: String,
    /// The tag argument of its echo server, to find that process.
    pub(super) tag: String,
    pub(super) tool: String,
    pub(super) arguments: Value,
    pub(super) ours: bool,
    path: &'static str,
    kind: ProxyKind,
    /// The address of its last start.
    last_address: Cell<Option<SocketAddr>>,
}

enum ProxyKind {
    Ours {
        home: BenchHome,
        session: String,
    },
    /// A program; `{port}` and `{config}` in its arguments are replaced.
    Peer {
        program: PathBuf,
        arguments: Vec<String>,
        config: Option<tempfile::TempDir>,
    },
}

/// A proxy that was started.
pub(super) struct RunningProxy {
    pid: u32,
    /// The session with the tool; only for Oubliette.
    session: Option<String>,
    process: ProxyProcess,
}

enum ProxyProcess {
    Ours(BenchServer),
    Peer(Child),
}

impl RunningProxy {
    /// Its processes, without the echo server.
    pub(super) fn processes(&self, tag: &str) -> Result<Vec<u32>> {
        let upstream = procs::pids_with_arguments(&[&own_program()?, "as-echo", tag]);
        let mut all = procs::descendants(self.pid);
        all.push(self.pid);
        all.retain(|pid| !upstream.contains(pid));
        Ok(all)
    }

    /// The relay socket of the session; only for Oubliette.
    pub(super) async fn relay_socket(&self) -> Result<PathBuf> {
        match (&self.process, &self.session) {
            (ProxyProcess::Ours(server), Some(session)) => {
                server.connect_rest().await?.relay_socket(session).await
            }
            _ => bail!("only Oubliette has a relay socket"),
        }
    }

    pub(super) async fn stop(self) -> Result<()> {
        match self.process {
            ProxyProcess::Ours(server) => server.stop().await,
            ProxyProcess::Peer(mut child) => {
                let below = procs::descendants(self.pid);
                procs::send_signal(self.pid, Signal::TERM);
                let ended = tokio::time::timeout(std::time::Duration::from_secs(3), child.wait()).await;
                if ended.is_err() {
                    child.kill().await?;
                }
                for pid in below {
                    procs::send_signal(pid, Signal::KILL);
                }
                Ok(())
            }
        }
    }
}

impl McpProxy {
    pub(super) async fn start(&self) -> Result<RunningProxy> {
        match &self.kind {
            ProxyKind::Ours { home, session } => {
                let server = home.spawn().await?;
                self.last_address.set(Some(server.address));
                Ok(RunningProxy {
                    pid: server.pid,
                    session: Some(session.clone()),
                    process: ProxyProcess::Ours(server),
                })
            }
            ProxyKind::Peer {
                program,
                arguments,
                config,
            } => {
                let address = free_address()?;
                self.last_address.set(Some(address));
                let file = config.as_ref().map(|dir| dir.path().join("proxy.toml"));
                if let Some(file) = &file {
                    std::fs::write(file, mcp_proxy_config(address.port(), &self.tag)?)?;
                }
                let file = file.map(|file| file.display().to_string()).unwrap_or_default();
                let fill = |text: &String| {
                    text.replace("{port}", &address.port().to_string())
                        .replace("{config}", &file)
                };
                let child = Command::new(program)
                    .args(arguments.iter().map(fill))
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .kill_on_drop(true)
                    .spawn()?;
                let pid = child.id().context("it ended at once")?;
                Ok(RunningProxy {
                    pid,
                    session: None,
                    process: ProxyProcess::Peer(child),
                })
            }
        }
    }

    /// Opens a new MCP session with the proxy as last started.
    pub(super) async fn reconnect_mcp(&self) -> Result<McpHttpClient> {
        let address = self.last_address.get().context("not started")?;
        let token = match &self.kind {
            ProxyKind::Ours { home, .. } => home.token.as_str(),
            ProxyKind::Peer { .. } => "",
        };
        McpHttpClient::open(address, self.path, token, BenchMcpRevision::Legacy).await
    }

    pub(super) async fn connect_mcp(&self, _: &RunningProxy) -> Result<McpHttpClient> {
        self.reconnect_mcp().await
    }
}

/// Oubliette first, then the peers that are installed.
pub(super) async fn installed_proxies(install: bool) -> Result<Vec<McpProxy>> {
    let target = PathBuf::from(own_program()?);
    let target = target
        .parent()
        .and_then(Path::parent)
        .context("this program is not in a target directory")?;
    if install {
        self::install_peers(target).await?;
    }
    let mut proxies = vec![
        oubliette_proxy(EchoIsolation::None).await?,
        oubliette_proxy(EchoIsolation::Sandbox).await?,
    ];
    let hello = json!({"text": "hello"});
    let echo = |tag: &str| anyhow::Ok([own_program()?, "as-echo".into(), tag.into(), "0".into()]);
    let mut add =
        |name: &str, tag: &str, program: PathBuf, needs: &Path, arguments: Vec<String>, tool: &str, path| {
            if !needs.is_file() {
                eprintln!("  {name} is not installed: --peers installs it");
                return Ok(());
            }
            let config = (tag == "crate").then(tempfile::tempdir).transpose()?;
            proxies.push(McpProxy {
                name: name.into(),
                tag: tag.into(),
                tool: tool.into(),
                arguments: hello.clone(),
                ours: false,
                path,
                kind: ProxyKind::Peer {
                    program,
                    arguments,
                    config,
                },
                last_address: Cell::new(None),
            });
            anyhow::Ok(())
        };
    let program = target.join("tools/bin/mcp-proxy");
    let arguments = ["--config", "{config}"].map(str::to_owned).into();
    add(
        "crate `mcp-proxy` 0.6.0",
        "crate",
        program.clone(),
        &program,
        arguments,
        "echo/echo",
        "/",
    )?;

    let script = target.join("peers/node_modules/supergateway/dist/index.js");
    let arguments = [
        &script.display().to_string(),
        "--stdio",
        &echo("supergateway")?.join(" "),
        "--outputTransport",
        "streamableHttp",
        "--stateful",
        "--port",
        "{port}",
        "--logLevel",
        "none",
    ];
    let arguments = arguments.map(str::to_owned).into();
    add(
        "npm `supergateway` 4.0.0",
        "supergateway",
        "node".into(),
        &script,
        arguments,
        "echo",
        "/mcp",
    )?;

    let script = target.join("peers/node_modules/mcp-proxy/dist/bin/mcp-proxy.mjs");
    let mut arguments: Vec<String> = [
        &script.display().to_string(),
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
        "--server",
        "stream",
        "--",
    ]
    .map(str::to_owned)
    .into();
    arguments.extend(echo("npm")?);
    add(
        "npm `mcp-proxy` 6.7",
        "npm",
        "node".into(),
        &script,
        arguments,
        "echo",
        "/mcp",
    )?;
    Ok(proxies)
}

/// Where Oubliette runs the echo server.
#[derive(Clone, Copy, PartialEq)]
enum EchoIsolation {
    /// Without a sandbox, as the peers run theirs.
    None,
    /// In a sandbox: Oubliette's default.
    Sandbox,
}

async fn oubliette_proxy(walls: EchoIsolation) -> Result<McpProxy> {
    // This line continues the `[trust]` section that `BenchHome::new` begins.
    let home = BenchHome::new("host_tools = [\"echo\"]").await?;
    let (tag, name) = match walls {
        EchoIsolation::None => ("ours", "**Oubliette**, `tool_call` over `/mcp`"),
        EchoIsolation::Sandbox => ("ours-sandboxed", "the same, echo server in a sandbox"),
    };
    match walls {
        EchoIsolation::None => home.write_host_echo("echo", tag)?,
        EchoIsolation::Sandbox => home.write_sandboxed_echo("echo", tag, 0)?,
    }
    home.write_agent(
        "talker",
        json!({"tools": {"use": ["echo"]}}),
        Some(json!({"turns": [[{"say": "ok"}]]})),
    )?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let project = rest.create_project("one", json!({})).await?;
    let session = rest.start_session(&project, "talker", None).await?;
    drop(rest);
    server.stop().await?;
    let arguments = json!({"session_id": session, "tool": "echo_echo", "arguments": {"text": "hello"}});
    Ok(McpProxy {
        name: name.into(),
        tag: tag.into(),
        tool: "tool_call".into(),
        arguments,
        ours: walls == EchoIsolation::None,
        path: "/mcp",
        kind: ProxyKind::Ours { home, session },
        last_address: Cell::new(None),
    })
}

fn mcp_proxy_config(port: u16, tag: &str) -> Result<String> {
    let own = own_program()?;
    Ok(format!(
        "[proxy]\nname = \"bench\"\nseparator = \"/\"\n[proxy.listen]\nhost = \"127.0.0.1\"\nport = {port}\n\
         [[backends]]\nname = \"echo\"\ntransport = \"stdio\"\ncommand = {own:?}\nargs = [\"as-echo\", {tag:?}, \"0\"]\n"
    ))
}

async fn install_peers(target: &Path) -> Result<()> {
    let run = async |program: &str, arguments: &[&str]| {
        let status = Command::new(program).args(arguments).status().await?;
        if !status.success() {
            bail!("{program} {} failed", arguments.join(" "));
        }
        anyhow::Ok(())
    };
    let tools = target.join("tools").display().to_string();
    if !target.join("tools/bin/mcp-proxy").is_file() {
        run(
            "cargo",
            &["install", "mcp-proxy@0.6.0", "--locked", "--root", &tools],
        )
        .await?;
    }
    let peers = target.join("peers").display().to_string();
    if !target.join("peers/node_modules/mcp-proxy").is_dir() {
        std::fs::create_dir_all(&peers)?;
        let packages = ["supergateway@4.0.0", "mcp-proxy@6.7.19"];
        run(
            "npm",
            &[
                &[
                    "install",
                    "--ignore-scripts",
                    "--no-audit",
                    "--no-fund",
                    "--prefix",
                    &peers,
                ][..],
                &packages,
            ]
            .concat(),
        )
        .await?;
    }
    Ok(())
}
