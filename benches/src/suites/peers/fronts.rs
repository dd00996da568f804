//! The fronts: ours, and peers as their registries have them.

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
    home::{Home, Server, free_address, own},
    mcp::{Mcp, Revision},
    procs,
};

/// Something that answers MCP over HTTP with the echo server's tool.
pub(super) struct Front {
    pub(super) name: String,
    /// Tells its echo server from the others'.
    pub(super) tag: String,
    pub(super) tool: String,
    pub(super) arguments: Value,
    pub(super) ours: bool,
    path: &'static str,
    kind: Kind,
    /// Where it was last started.
    at: Cell<Option<SocketAddr>>,
}

enum Kind {
    Ours {
        home: Home,
        session: String,
    },
    /// A program, with `{port}` and `{config}` where those go.
    Peer {
        program: PathBuf,
        arguments: Vec<String>,
        config: Option<tempfile::TempDir>,
    },
}

/// A front that was started.
pub(super) struct Running {
    pid: u32,
    /// The session that has the tool, of ours.
    session: Option<String>,
    process: Process,
}

enum Process {
    Ours(Server),
    Peer(Child),
}

impl Running {
    /// Its processes, the echo server not among them.
    pub(super) fn processes(&self, tag: &str) -> Result<Vec<u32>> {
        let upstream = procs::with_arguments(&[&own()?, "as-echo", tag]);
        let mut all = procs::below(self.pid);
        all.push(self.pid);
        all.retain(|pid| !upstream.contains(pid));
        Ok(all)
    }

    /// The relay socket of the session, of ours.
    pub(super) async fn socket(&self) -> Result<PathBuf> {
        match (&self.process, &self.session) {
            (Process::Ours(server), Some(session)) => server.rest().await?.socket(session).await,
            _ => bail!("only ours has one"),
        }
    }

    pub(super) async fn stop(self) -> Result<()> {
        match self.process {
            Process::Ours(server) => server.stop().await,
            Process::Peer(mut child) => {
                let below = procs::below(self.pid);
                procs::kill(self.pid, Signal::TERM);
                let ended = tokio::time::timeout(std::time::Duration::from_secs(3), child.wait()).await;
                if ended.is_err() {
                    child.kill().await?;
                }
                for pid in below {
                    procs::kill(pid, Signal::KILL);
                }
                Ok(())
            }
        }
    }
}

impl Front {
    pub(super) async fn start(&self) -> Result<Running> {
        match &self.kind {
            Kind::Ours { home, session } => {
                let server = home.spawn().await?;
                self.at.set(Some(server.address));
                Ok(Running {
                    pid: server.pid,
                    session: Some(session.clone()),
                    process: Process::Ours(server),
                })
            }
            Kind::Peer {
                program,
                arguments,
                config,
            } => {
                let address = free_address()?;
                self.at.set(Some(address));
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
                Ok(Running {
                    pid,
                    session: None,
                    process: Process::Peer(child),
                })
            }
        }
    }

    /// A new MCP session with what was last started.
    pub(super) async fn reopen(&self) -> Result<Mcp> {
        let address = self.at.get().context("not started")?;
        let token = match &self.kind {
            Kind::Ours { home, .. } => home.token.as_str(),
            Kind::Peer { .. } => "",
        };
        Mcp::open(address, self.path, token, Revision::Legacy).await
    }

    pub(super) async fn open(&self, _: &Running) -> Result<Mcp> {
        self.reopen().await
    }
}

/// Ours first, then the peers that are installed.
pub(super) async fn all(install: bool) -> Result<Vec<Front>> {
    let target = PathBuf::from(own()?);
    let target = target
        .parent()
        .and_then(Path::parent)
        .context("this program is not in a target directory")?;
    if install {
        self::install(target).await?;
    }
    let mut fronts = vec![ours(Walls::None).await?, ours(Walls::Sandbox).await?];
    let hello = json!({"text": "hello"});
    let echo = |tag: &str| anyhow::Ok([own()?, "as-echo".into(), tag.into(), "0".into()]);
    let mut add =
        |name: &str, tag: &str, program: PathBuf, needs: &Path, arguments: Vec<String>, tool: &str, path| {
            if !needs.is_file() {
                eprintln!("  {name} is not installed: --peers installs it");
                return Ok(());
            }
            let config = (tag == "crate").then(tempfile::tempdir).transpose()?;
            fronts.push(Front {
                name: name.into(),
                tag: tag.into(),
                tool: tool.into(),
                arguments: hello.clone(),
                ours: false,
                path,
                kind: Kind::Peer {
                    program,
                    arguments,
                    config,
                },
                at: Cell::new(None),
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
    Ok(fronts)
}

/// Where our echo server runs.
#[derive(Clone, Copy, PartialEq)]
enum Walls {
    /// As the peers run theirs.
    None,
    /// As ours are run unless the operator says otherwise.
    Sandbox,
}

async fn ours(walls: Walls) -> Result<Front> {
    // The first line goes on in the section that lets our own programs into sandboxes.
    let home = Home::new("host_tools = [\"echo\"]").await?;
    let (tag, name) = match walls {
        Walls::None => ("ours", "**Oubliette**, `tool_call` over `/mcp`"),
        Walls::Sandbox => ("ours-sandboxed", "the same, echo server in a sandbox"),
    };
    match walls {
        Walls::None => home.bare_echo("echo", tag)?,
        Walls::Sandbox => home.echo("echo", tag, 0)?,
    }
    home.agent(
        "talker",
        json!({"tools": {"use": ["echo"]}}),
        Some(json!({"turns": [[{"say": "ok"}]]})),
    )?;
    let server = home.start().await?;
    let mut rest = server.rest().await?;
    let project = rest.project("one", json!({})).await?;
    let session = rest.session(&project, "talker", None).await?;
    drop(rest);
    server.stop().await?;
    let arguments = json!({"session_id": session, "tool": "echo_echo", "arguments": {"text": "hello"}});
    Ok(Front {
        name: name.into(),
        tag: tag.into(),
        tool: "tool_call".into(),
        arguments,
        ours: walls == Walls::None,
        path: "/mcp",
        kind: Kind::Ours { home, session },
        at: Cell::new(None),
    })
}

fn mcp_proxy_config(port: u16, tag: &str) -> Result<String> {
    let own = own()?;
    Ok(format!(
        "[proxy]\nname = \"bench\"\nseparator = \"/\"\n[proxy.listen]\nhost = \"127.0.0.1\"\nport = {port}\n\
         [[backends]]\nname = \"echo\"\ntransport = \"stdio\"\ncommand = {own:?}\nargs = [\"as-echo\", {tag:?}, \"0\"]\n"
    ))
}

async fn install(target: &Path) -> Result<()> {
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
                &["install", "--no-audit", "--no-fund", "--prefix", &peers][..],
                &packages,
            ]
            .concat(),
        )
        .await?;
    }
    Ok(())
}
