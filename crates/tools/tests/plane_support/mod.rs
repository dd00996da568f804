//! What the tests of the plane share: a session's surroundings, with every source in place.
#![allow(dead_code, unreachable_pub, missing_docs)]

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use oubliette_protocol::{
    CallerId, CatalogId, Error, Object, Result, SessionId, Slug,
    agent::AgentDefinition,
    caller::{self, Declaration, LentTool},
    catalog::ToolDefinition,
    debug::DebugBody,
    strict,
    tool::{CallResult, ToolRow, ToolSpec},
};
use oubliette_sandbox::{Host, Level, Limits, Local, LocalConfig, Sandbox};
use oubliette_tools::{
    BuildSpec, CallContext, CallThread, Callers, Context, DebugSink, Origin, OwnTools, Permit, Plane,
    PlaneParts, Trust, Wanted,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

/// Nothing in these tests takes this long.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(done) => done,
        Err(_) => panic!("waited in vain: {what}"),
    }
}

/// Keeps debugger events and lets tests wait for them.
pub struct Recorder {
    events: Mutex<Vec<DebugBody>>,
    count: watch::Sender<usize>,
}

impl Recorder {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            events: Mutex::default(),
            count: watch::Sender::new(0),
        })
    }

    pub fn all(&self) -> Vec<Value> {
        self.events
            .lock()
            .iter()
            .map(|body| serde_json::to_value(body).unwrap())
            .collect()
    }

    pub fn of(&self, kind: &str) -> Vec<Value> {
        self.all()
            .into_iter()
            .filter(|event| event["kind"] == kind)
            .collect()
    }

    pub fn kinds(&self) -> Vec<&'static str> {
        self.events.lock().iter().map(DebugBody::kind).collect()
    }

    /// Waits until some event is as wanted.
    pub async fn wait(&self, what: &str, wanted: impl Fn(&Value) -> bool) {
        let mut news = self.count.subscribe();
        soon(what, async {
            while !self.all().iter().any(&wanted) {
                news.changed().await.unwrap();
            }
        })
        .await;
    }
}

impl DebugSink for Recorder {
    fn record(&self, agent: Option<&Slug>, body: DebugBody) {
        assert_eq!(agent.map(Slug::as_str), Some("writer"));
        self.events.lock().push(body);
        self.count.send_modify(|count| *count += 1);
    }
}

/// Callers that answer with what they were asked.
#[derive(Default)]
pub struct Lenders(pub Mutex<Vec<Arc<Declaration>>>);

impl Lenders {
    pub fn declare(&self, context: Value) {
        let declaration = strict::arguments::<caller::Context>(context)
            .unwrap()
            .check()
            .unwrap();
        self.0.lock().push(declaration.into());
    }
}

#[async_trait]
impl Callers for Lenders {
    fn declarations(&self) -> Vec<Arc<Declaration>> {
        self.0.lock().clone()
    }

    fn may_call(&self, _caller_id: &CallerId, origin: &Origin) -> Result<()> {
        match origin {
            Origin::Outside(who) if who.token_id.is_some() => Err(Error::permission_denied("another's tool")),
            _ => Ok(()),
        }
    }

    async fn call(
        &self,
        permit: Permit,
        caller_id: &CallerId,
        tool: &LentTool,
        arguments: Value,
        ctx: &CallContext,
    ) -> Result<Value> {
        if tool.name == "wait" {
            ctx.cancel.cancelled().await;
            return Err(Error::caller_disconnected("it gave up"));
        }
        if tool.name == "deaf" {
            std::future::pending::<()>().await;
        }
        Ok(
            json!({ "caller": caller_id, "tool": tool.name, "canonical": permit.canonical(), "arguments": arguments }),
        )
    }
}

/// Oubliette's own tools, likewise.
pub struct Own;

#[async_trait]
impl OwnTools for Own {
    async fn list(&self, _session: &SessionId, key: &str) -> Result<Vec<ToolSpec>> {
        match key {
            "good" => Ok(vec![spec("project_list"), spec("session_list")]),
            _ => Err(Error::unauthenticated("bad key")),
        }
    }

    async fn call(
        &self,
        permit: Permit,
        _session: &SessionId,
        origin: &Origin,
        tool: &str,
        arguments: Object,
        _ctx: &CallContext,
    ) -> Result<Value> {
        match origin {
            Origin::Inside { api_key } if api_key.as_deref() != Some("good") => {
                Err(Error::unauthenticated("bad key"))
            }
            _ => Ok(json!({ "own": tool, "canonical": permit.canonical(), "arguments": arguments })),
        }
    }

    fn base_specs(&self) -> Vec<ToolSpec> {
        ["session_message", "session_events", "project_list"]
            .map(spec)
            .into()
    }

    async fn base(
        &self,
        _permit: Permit,
        _session: &SessionId,
        tool: &str,
        _arguments: Object,
        _ctx: &CallContext,
    ) -> Result<Value> {
        Ok(json!({ "base": tool }))
    }
}

fn spec(name: &str) -> ToolSpec {
    ToolSpec {
        name: name.into(),
        description: String::new(),
        input_schema: json!({"type":"object"}),
    }
}

/// The test server and inner stage, built with this crate's tests.
pub fn program() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let program = here
        .parent()
        .and_then(Path::parent)
        .unwrap()
        .join("examples/tool_server");
    assert!(
        program.exists(),
        "build it first: cargo build -p oubliette-tools --examples"
    );
    program
}

/// A session's surroundings.
pub struct World {
    pub dir: tempfile::TempDir,
    pub recorder: Arc<Recorder>,
    pub lenders: Arc<Lenders>,
    pub plane: Arc<Plane>,
    pub sandbox: Arc<dyn Sandbox>,
    pub env: HashMap<String, String>,
    pub trust: Trust,
    pub session: SessionId,
}

impl World {
    pub fn new() -> Self {
        Self::with(Arc::new(Host::new(program())))
    }

    /// With the real sandbox.
    pub async fn local() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("run");
        std::fs::create_dir(&run_dir).unwrap();
        let config = LocalConfig {
            client: program(),
            minimum: Level::Landlock,
            bwrap: None,
            run_dir,
        };
        let local = Local::new(config).await.unwrap();
        Self {
            dir,
            ..Self::with(Arc::new(local))
        }
        .furnished()
    }

    fn with(sandbox: Arc<dyn Sandbox>) -> Self {
        let (recorder, lenders) = (Recorder::new(), Arc::new(Lenders::default()));
        let session = SessionId::generate();
        let plane = Plane::new(PlaneParts {
            session_id: session.clone(),
            callers: lenders.clone(),
            own: Arc::new(Own),
            debug: recorder.clone(),
            thread: CallThread::here(),
        });
        let dir = tempfile::tempdir().unwrap();
        let (env, trust) = (HashMap::new(), Trust::default());
        Self {
            dir,
            recorder,
            lenders,
            plane,
            sandbox,
            env,
            trust,
            session,
        }
        .furnished()
    }

    fn furnished(self) -> Self {
        std::fs::create_dir_all(self.workspace()).unwrap();
        self
    }

    pub fn workspace(&self) -> PathBuf {
        self.dir.path().join("workspace")
    }

    /// Writes a file of the workspace.
    pub fn file(&self, path: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.workspace().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    pub async fn build(&self, tools: Value, catalog: &[Value]) -> Result<Arc<Context>> {
        let agent = json!({"name":"W","prompt":"p","tools":tools});
        self.build_agent(agent, catalog).await
    }

    pub async fn build_agent(&self, agent: Value, catalog: &[Value]) -> Result<Arc<Context>> {
        let (definition, catalog, known) = definitions(&agent, catalog);
        let spec = BuildSpec {
            session_id: self.session.clone(),
            agent: "writer".parse().unwrap(),
            definition,
            catalog,
            known,
            workspace: self.workspace(),
            sandbox: self.sandbox.clone(),
            host: Arc::new(Host::new(program())),
            trust: self.trust.clone().into(),
            limits: Limits {
                workspace_mb: Some(32),
                ..Limits::default()
            },
            env: Arc::new(self.env.clone()),
            debug: self.recorder.clone(),
            proxy_socket: None,
            thread: self.plane.thread().clone(),
        };
        soon("the build", Context::build(spec)).await
    }

    /// Edits the agent or its catalog while it runs; returns when its servers have followed.
    pub async fn edit(&self, context: &Arc<Context>, tools: Value, catalog: &[Value]) -> Result<()> {
        let (definition, catalog, known) =
            definitions(&json!({"name":"W","prompt":"p","tools":tools}), catalog);
        soon("the edit", context.apply(definition, &catalog, known)?).await;
        Ok(())
    }

    /// Builds and opens the plane to it.
    pub async fn install(&self, tools: Value, catalog: &[Value]) -> Arc<Context> {
        let context = self.build(tools, catalog).await.unwrap();
        self.plane.install(context.clone());
        context
    }

    /// One built-in as the only tool, called by its own name.
    pub async fn builtin(&self, policy: Value) {
        let entry = json!({"id":"b","kind":"builtin","builtinPolicy":policy});
        let name = policy_name(&entry);
        self.install(
            json!({"use":["b"],"aliases":{"it":format!("@b/{name}")}}),
            &[entry],
        )
        .await;
    }

    /// Calls that one.
    pub async fn it(&self, arguments: Value) -> Result<CallResult> {
        self.call("it", arguments).await
    }

    pub async fn call(&self, tool: &str, arguments: Value) -> Result<CallResult> {
        self.call_as(Wanted::Any(tool.into()), arguments, inside()).await
    }

    pub async fn call_as(&self, wanted: Wanted, arguments: Value, origin: Origin) -> Result<CallResult> {
        let Value::Object(arguments) = arguments else {
            panic!("no object")
        };
        soon(
            "the call",
            self.plane.call(wanted, arguments, origin, CallContext::default()),
        )
        .await
    }

    pub fn row(&self, name: &str) -> ToolRow {
        let list = self.plane.list();
        let mut rows = list.tools.into_iter();
        rows.find(|row| row.name == name || row.canonical == name)
            .unwrap_or_else(|| panic!("no {name}"))
    }

    pub fn listed(&self) -> Vec<String> {
        self.plane
            .agent_tools()
            .into_iter()
            .map(|tool| tool.name)
            .collect()
    }
}

type Definitions = (
    Arc<AgentDefinition>,
    Vec<Arc<ToolDefinition>>,
    Arc<HashSet<CatalogId>>,
);

fn definitions(agent: &Value, catalog: &[Value]) -> Definitions {
    let definition = AgentDefinition::parse(&agent.to_string()).unwrap();
    let catalog: Vec<_> = catalog
        .iter()
        .map(|tool| Arc::new(definition_of(tool.clone())))
        .collect();
    let mut known: HashSet<_> = catalog.iter().map(|tool| tool.id().clone()).collect();
    known.insert("other".parse().unwrap());
    (definition.into(), catalog, known.into())
}

fn policy_name(entry: &Value) -> String {
    entry["builtinPolicy"]["name"].as_str().unwrap().to_owned()
}

pub fn definition_of(value: Value) -> ToolDefinition {
    ToolDefinition::from_value(value).unwrap()
}

pub fn inside() -> Origin {
    Origin::Inside {
        api_key: Some("good".into()),
    }
}

/// A stdio definition of the test server, merged with `more`.
pub fn server(id: &str, more: Value) -> Value {
    let mut base = json!({"id":id,"kind":"mcp","transport":"stdio","command":program(),
        "timeouts":{"startupMs":60000,"requestMs":60000}});
    base.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    base
}
