//! A home of its own for each suite, and the real server on it.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::{
    clock,
    http::{DEADLINE, Http},
    procs,
};

/// Where the programs are: beside this one.
pub(crate) fn program(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let path = own.with_file_name(name);
    if !path.is_file() {
        bail!(
            "{} is missing: build it, or use `cargo xtask bench`",
            path.display()
        );
    }
    Ok(path)
}

/// This program, to be started as something else.
pub(crate) fn own() -> Result<String> {
    Ok(std::env::current_exe()?
        .to_str()
        .context("our path is not UTF-8")?
        .to_owned())
}

/// A home in a directory that goes with it.
pub(crate) struct Home {
    dir: tempfile::TempDir,
    pub(crate) token: String,
}

impl Home {
    /// With these lines in oubliette.toml, beside those that let our own programs into sandboxes.
    pub(crate) async fn new(config: &str) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("oub-").tempdir()?;
        let root = dir.path().join("home");
        fs::create_dir(&root)?;
        let own = own()?;
        let programs = Path::new(&own).parent().context("no directory")?;
        let trust = format!("[trust]\nread_only = [{:?}]\n", programs.display().to_string());
        fs::write(root.join("oubliette.toml"), format!("{trust}{config}\n"))?;
        let output = Command::new(program("oubliette")?)
            .arg("--home")
            .arg(&root)
            .args(["--json", "token", "create", "--name", "bench", "--scope", "admin"])
            .output()
            .await?;
        let made: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("no token: {}", String::from_utf8_lossy(&output.stderr)))?;
        let token = made["token"].as_str().context("no token")?.to_owned();
        Ok(Self { dir, token })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("home")
    }

    /// An agent; with a script it is the built-in one following it.
    pub(crate) fn agent(&self, slug: &str, mut definition: Value, script: Option<Value>) -> Result<()> {
        let dir = self.path().join("agents").join(slug);
        fs::create_dir_all(&dir)?;
        if let Some(script) = script {
            definition["model"] = json!("script:script.json");
            fs::write(dir.join("script.json"), script.to_string())?;
        }
        definition["name"] = json!(slug);
        definition["prompt"] = json!("You are measured.");
        Ok(fs::write(dir.join("agent.json"), definition.to_string())?)
    }

    /// The built-in agent that says one word a turn.
    pub(crate) fn talker(&self, slug: &str) -> Result<()> {
        self.agent(slug, json!({}), Some(json!({"turns": [[{"say": "ok"}]]})))
    }

    /// Our own program as an MCP server in the catalog, in a sandbox.
    pub(crate) fn echo(&self, id: &str, tag: &str, delay_ms: u64) -> Result<()> {
        let own = own()?;
        let programs = Path::new(&own).parent().context("no directory")?;
        self.tool(id, tag, delay_ms, json!({ "read_only": [programs] }))
    }

    /// The same, outside any.
    pub(crate) fn bare_echo(&self, id: &str, tag: &str) -> Result<()> {
        self.tool(id, tag, 0, json!({"isolation": "host"}))
    }

    fn tool(&self, id: &str, tag: &str, delay_ms: u64, mut definition: Value) -> Result<()> {
        let arguments = ["as-echo", tag, &delay_ms.to_string()];
        for (field, value) in [
            ("id", json!(id)),
            ("kind", json!("mcp")),
            ("transport", json!("stdio")),
            ("command", json!(own()?)),
            ("args", json!(arguments)),
        ] {
            definition[field] = value;
        }
        let dir = self.path().join("tools").join(id);
        fs::create_dir_all(&dir)?;
        Ok(fs::write(dir.join("tool.json"), definition.to_string())?)
    }

    /// Starts the server and waits until it is ready.
    pub(crate) async fn start(&self) -> Result<Server> {
        let server = self.spawn().await?;
        server.ready().await?;
        Ok(server)
    }

    /// Starts the server.
    pub(crate) async fn spawn(&self) -> Result<Server> {
        let address = free_address()?;
        let log = fs::File::options().append(true).create(true).open(self.log())?;
        let spawned_at = clock::now();
        let child = Command::new(program("oubliette")?)
            .arg("--home")
            .arg(self.path())
            .args(["serve", "--listen", &address.to_string()])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()?;
        let pid = child.id().context("it ended at once")?;
        Ok(Server {
            child,
            pid,
            address,
            token: self.token.clone(),
            spawned_at,
            log: self.log(),
        })
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("server.log")
    }
}

/// An address nobody listens on.
pub(crate) fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

/// A running server.
pub(crate) struct Server {
    child: Child,
    pub(crate) pid: u32,
    pub(crate) address: SocketAddr,
    pub(crate) token: String,
    pub(crate) spawned_at: u64,
    log: PathBuf,
}

impl Server {
    /// Waits until `/ready` says so; how long that took from the start.
    pub(crate) async fn ready(&self) -> Result<Duration> {
        let asked = async {
            loop {
                if let Ok(mut http) = Http::connect(self.address, "").await {
                    while let Ok(answer) = http.get("/ready").await {
                        if answer.status == 200 {
                            return clock::since(self.spawned_at);
                        }
                        tokio::time::sleep(Duration::from_micros(500)).await;
                    }
                }
                tokio::time::sleep(Duration::from_micros(500)).await;
            }
        };
        match tokio::time::timeout(Duration::from_secs(30), asked).await {
            Ok(took) => Ok(took),
            Err(_) => bail!(
                "the server is not ready: {}",
                fs::read_to_string(&self.log).unwrap_or_default()
            ),
        }
    }

    /// A connection that asks by plain JSON.
    pub(crate) async fn rest(&self) -> Result<Rest> {
        let headers = format!("Authorization: Bearer {}\r\n", self.token);
        Ok(Rest(Http::connect(self.address, &headers).await?))
    }

    /// Ends it as a service manager would.
    pub(crate) async fn stop(mut self) -> Result<()> {
        procs::kill(self.pid, Signal::TERM);
        tokio::time::timeout(DEADLINE, self.child.wait())
            .await
            .context("the server does not stop")??;
        Ok(())
    }
}

/// Tools by plain JSON.
pub(crate) struct Rest(pub(crate) Http);

impl Rest {
    pub(crate) async fn tool(&mut self, name: &str, arguments: Value) -> Result<Value> {
        let answer = self
            .0
            .post(&format!("/api/tools/{name}"), "", &arguments.to_string())
            .await?;
        if answer.status != 200 {
            bail!(
                "{name}: status {}: {}",
                answer.status,
                String::from_utf8_lossy(&answer.body)
            );
        }
        answer.json()
    }

    /// The same, its answer only looked at.
    pub(crate) async fn call(&mut self, name: &str, arguments: &str) -> Result<()> {
        let answer = self.0.post(&format!("/api/tools/{name}"), "", arguments).await?;
        if answer.status != 200 {
            bail!(
                "{name}: status {}: {}",
                answer.status,
                String::from_utf8_lossy(&answer.body)
            );
        }
        Ok(())
    }

    pub(crate) async fn project(&mut self, name: &str, more: Value) -> Result<String> {
        let mut arguments = json!({ "name": name });
        if let (Some(to), Some(from)) = (arguments.as_object_mut(), more.as_object()) {
            to.extend(from.clone());
        }
        text(&self.tool("project_create", arguments).await?, "project_id")
    }

    /// A session whose first turn is done.
    pub(crate) async fn session(
        &mut self,
        project: &str,
        agent: &str,
        context: Option<Value>,
    ) -> Result<String> {
        let mut arguments = json!({"project_id": project, "agent": agent, "message": "go", "wait": true});
        if let Some(context) = context {
            arguments["context"] = context;
        }
        text(&self.tool("session_message", arguments).await?, "session_id")
    }

    /// The relay socket of a session, on the host.
    pub(crate) async fn socket(&mut self, session: &str) -> Result<PathBuf> {
        Ok(text(
            &self.tool("session_get", json!({ "session_id": session })).await?,
            "relay_socket",
        )?
        .into())
    }
}

/// A text field.
pub(crate) fn text(value: &Value, field: &str) -> Result<String> {
    Ok(value[field]
        .as_str()
        .with_context(|| format!("no {field} in {value}"))?
        .to_owned())
}

/// `oubliette-client`, as an agent starts it, for a session's socket.
pub(crate) fn client(socket: &Path, key: Option<&str>) -> Result<Command> {
    let mut command = Command::new(program("oubliette-client")?);
    command
        .env("OUBLIETTE_SOCKET", socket)
        .env_remove("OUBLIETTE_API_KEY");
    if let Some(key) = key {
        command.env("OUBLIETTE_API_KEY", key);
    }
    Ok(command)
}
