//! A temporary home directory for a suite, the real server on it, and a REST client for that server.

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
    http::{ANSWER_TIMEOUT, HttpConnection},
    procs,
};

/// The path of one of Oubliette's programs, which are in the same directory as this one.
pub(crate) fn sibling_program(name: &str) -> Result<PathBuf> {
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

/// The path of this program, to start it as an actor.
pub(crate) fn own_program() -> Result<String> {
    Ok(std::env::current_exe()?
        .to_str()
        .context("our path is not UTF-8")?
        .to_owned())
}

/// A home directory, deleted when dropped, with an admin token.
pub(crate) struct BenchHome {
    dir: tempfile::TempDir,
    pub(crate) token: String,
    /// Variables of the server's environment, besides those of this process.
    env: Vec<(&'static str, String)>,
    /// Where its server listens; a free address at each start if there is none.
    address: Option<SocketAddr>,
}

/// What differs from a home of one server on SQLite.
#[derive(Default)]
pub(crate) struct HomeOptions {
    /// Variables of the server's environment, besides those of this process.
    pub(crate) env: Vec<(&'static str, String)>,
    /// Where its server listens; a free address at each start if there is none.
    pub(crate) address: Option<SocketAddr>,
    /// An admin token that its database has already; one is made if there is none.
    pub(crate) token: Option<String>,
}

impl BenchHome {
    /// Creates a home. `config` is appended to an oubliette.toml whose `[trust]` section makes our own programs
    /// readable in sandboxes; its first lines continue that section.
    pub(crate) async fn new(config: &str) -> Result<Self> {
        Self::with_options(config, HomeOptions::default()).await
    }

    /// Creates a home with these options; `config` as for [`BenchHome::new`].
    #[allow(clippy::disallowed_methods, reason = "no agent of the bench makes deep trees")]
    pub(crate) async fn with_options(config: &str, options: HomeOptions) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("oub-").tempdir()?;
        let root = dir.path().join("home");
        fs::create_dir(&root)?;
        let own = own_program()?;
        let programs = Path::new(&own).parent().context("no directory")?;
        let trust = format!("[trust]\nread_only = [{:?}]\n", programs.display().to_string());
        fs::write(root.join("oubliette.toml"), format!("{trust}{config}\n"))?;
        let HomeOptions { env, address, token } = options;
        let token = match token {
            Some(token) => token,
            None => create_token(&root, &env).await?,
        };
        Ok(Self {
            dir,
            token,
            env,
            address,
        })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("home")
    }

    /// Writes an agent's definition; with a script, it is the built-in agent with that script.
    pub(crate) fn write_agent(&self, slug: &str, mut definition: Value, script: Option<Value>) -> Result<()> {
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

    /// Writes an agent that says one word per turn.
    pub(crate) fn write_talker_agent(&self, slug: &str) -> Result<()> {
        self.write_agent(slug, json!({}), Some(json!({"turns": [[{"say": "ok"}]]})))
    }

    /// Writes a catalog entry for the echo server of this program, in a sandbox.
    pub(crate) fn write_sandboxed_echo(&self, id: &str, tag: &str, delay_ms: u64) -> Result<()> {
        let own = own_program()?;
        let programs = Path::new(&own).parent().context("no directory")?;
        self.write_tool(id, tag, delay_ms, json!({ "read_only": [programs] }))
    }

    /// Writes a catalog entry for the echo server of this program, without a sandbox.
    pub(crate) fn write_host_echo(&self, id: &str, tag: &str) -> Result<()> {
        self.write_tool(id, tag, 0, json!({"isolation": "host"}))
    }

    fn write_tool(&self, id: &str, tag: &str, delay_ms: u64, mut definition: Value) -> Result<()> {
        let arguments = ["as-echo", tag, &delay_ms.to_string()];
        for (field, value) in [
            ("id", json!(id)),
            ("kind", json!("mcp")),
            ("transport", json!("stdio")),
            ("command", json!(own_program()?)),
            ("args", json!(arguments)),
        ] {
            definition[field] = value;
        }
        let dir = self.path().join("tools").join(id);
        fs::create_dir_all(&dir)?;
        Ok(fs::write(dir.join("tool.json"), definition.to_string())?)
    }

    /// Starts the server and waits until it is ready.
    pub(crate) async fn start(&self) -> Result<BenchServer> {
        let server = self.spawn().await?;
        server.wait_ready().await?;
        Ok(server)
    }

    /// Starts the server without waiting for it.
    pub(crate) async fn spawn(&self) -> Result<BenchServer> {
        let address = match self.address {
            Some(address) => address,
            None => free_address()?,
        };
        let log = fs::File::options().append(true).create(true).open(self.log())?;
        let spawned_at = clock::now();
        let child = Command::new(sibling_program("oubliette")?)
            .arg("--home")
            .arg(self.path())
            .args(["serve", "--listen", &address.to_string()])
            .envs(self.env.iter().map(|(name, value)| (*name, value.as_str())))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()?;
        let pid = child.id().context("it ended at once")?;
        Ok(BenchServer {
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

/// Makes an admin token in the database of a home whose server does not run.
async fn create_token(root: &Path, env: &[(&'static str, String)]) -> Result<String> {
    let output = Command::new(sibling_program("oubliette")?)
        .arg("--home")
        .arg(root)
        .args(["--json", "token", "create", "--name", "bench", "--scope", "admin"])
        .envs(env.iter().map(|(name, value)| (*name, value.as_str())))
        .output()
        .await?;
    let made: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("no token: {}", String::from_utf8_lossy(&output.stderr)))?;
    text_field(&made, "token")
}

/// A loopback address that nothing listens on.
pub(crate) fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

/// A running server, killed when dropped.
pub(crate) struct BenchServer {
    child: Child,
    pub(crate) pid: u32,
    pub(crate) address: SocketAddr,
    pub(crate) token: String,
    pub(crate) spawned_at: u64,
    log: PathBuf,
}

impl BenchServer {
    /// Waits until `/ready` answers 200; returns the time since the process was started.
    pub(crate) async fn wait_ready(&self) -> Result<Duration> {
        let asked = async {
            loop {
                if let Ok(mut http) = HttpConnection::connect(self.address, "").await {
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

    /// A new connection for tool calls over REST.
    pub(crate) async fn connect_rest(&self) -> Result<RestClient> {
        let headers = format!("Authorization: Bearer {}\r\n", self.token);
        Ok(RestClient(HttpConnection::connect(self.address, &headers).await?))
    }

    /// Kills it with SIGKILL; returns when it was killed, once it has ended.
    pub(crate) async fn kill(mut self) -> Result<u64> {
        let killed_at = clock::now();
        procs::send_signal(self.pid, Signal::KILL);
        self.child.wait().await?;
        Ok(killed_at)
    }

    /// Stops it with SIGTERM, as a service manager would, and waits for its end.
    pub(crate) async fn stop(mut self) -> Result<()> {
        procs::send_signal(self.pid, Signal::TERM);
        tokio::time::timeout(ANSWER_TIMEOUT, self.child.wait())
            .await
            .context("the server does not stop")??;
        Ok(())
    }
}

/// A REST client: tool calls as JSON over one connection.
pub(crate) struct RestClient(pub(crate) HttpConnection);

impl RestClient {
    pub(crate) async fn call_tool(&mut self, name: &str, arguments: Value) -> Result<Value> {
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

    /// Calls a tool and checks the status; the answer is not parsed.
    pub(crate) async fn call_unparsed(&mut self, name: &str, arguments: &str) -> Result<()> {
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

    pub(crate) async fn create_project(&mut self, name: &str, more: Value) -> Result<String> {
        let mut arguments = json!({ "name": name });
        if let (Some(to), Some(from)) = (arguments.as_object_mut(), more.as_object()) {
            to.extend(from.clone());
        }
        text_field(&self.call_tool("project_create", arguments).await?, "project_id")
    }

    /// Starts a session and waits for its first turn.
    pub(crate) async fn start_session(
        &mut self,
        project: &str,
        agent: &str,
        context: Option<Value>,
    ) -> Result<String> {
        let mut arguments = json!({"project_id": project, "agent": agent, "message": "go", "wait": true});
        if let Some(context) = context {
            arguments["context"] = context;
        }
        text_field(&self.call_tool("session_message", arguments).await?, "session_id")
    }

    /// The path of a session's relay socket on the host.
    pub(crate) async fn relay_socket(&mut self, session: &str) -> Result<PathBuf> {
        Ok(text_field(
            &self
                .call_tool("session_get", json!({ "session_id": session }))
                .await?,
            "relay_socket",
        )?
        .into())
    }
}

/// A field that must be a string.
pub(crate) fn text_field(value: &Value, field: &str) -> Result<String> {
    Ok(value[field]
        .as_str()
        .with_context(|| format!("no {field} in {value}"))?
        .to_owned())
}

/// The command of `oubliette-client` for a session's socket, as an agent starts it.
pub(crate) fn client_command(socket: &Path, key: Option<&str>) -> Result<Command> {
    let mut command = Command::new(sibling_program("oubliette-client")?);
    command
        .env("OUBLIETTE_SOCKET", socket)
        .env("OUBLIETTE_HANDOFF_SOCKET", socket.with_file_name("stdio.sock"))
        .env_remove("OUBLIETTE_API_KEY");
    if let Some(key) = key {
        command.env("OUBLIETTE_API_KEY", key);
    }
    Ok(command)
}
