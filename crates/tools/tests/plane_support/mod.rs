//! Shared by the tool plane's tests: a fixture with a plane, a debugger recorder and stand-ins for every source.
#![allow(dead_code, unreachable_pub, missing_docs)]

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use oubliette_protocol::{
    CallerId, CatalogId, Error, JsonObject, Result, SessionId, Slug,
    agent::AgentDefinition,
    caller::{self, CallerDeclaration, LentTool},
    catalog::ToolDefinition,
    debug::DebugBody,
    strict,
    tool::{CallResult, ListedTool, ToolSpec},
};
use oubliette_sandbox::{
    HostDriver, IsolationLevel, LocalDriver, LocalDriverConfig, ResourceLimits, SandboxDriver,
};
use oubliette_tools::{
    AgentContext, Approver, CallContext, CallMeter, CallOrigin, CallThread, CallToApprove, CallerTools,
    ContextSpec, DebugSink, OwnTools, Permit, RequestedTool, ServerSetup, ToolPlane, ToolPlaneParts,
    TrustedResources,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

/// A wait longer than this fails the test.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(120);

pub async fn within_timeout<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(TEST_TIMEOUT, future).await {
        Ok(done) => done,
        Err(_) => panic!("timed out waiting for {what}"),
    }
}

/// Keeps debugger events and lets tests wait for them.
pub struct DebugRecorder {
    events: Mutex<Vec<DebugBody>>,
    count: watch::Sender<usize>,
}

impl DebugRecorder {
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

    /// Waits until an event satisfies `wanted`.
    pub async fn wait(&self, what: &str, wanted: impl Fn(&Value) -> bool) {
        let mut news = self.count.subscribe();
        within_timeout(what, async {
            while !self.all().iter().any(&wanted) {
                news.changed().await.unwrap();
            }
        })
        .await;
    }
}

/// Counts calls, and refuses those beyond a number.
pub struct TestMeter {
    /// How many places are left.
    pub places: AtomicUsize,
    pub counted: AtomicUsize,
}

impl CallMeter for TestMeter {
    fn reserve_call(self: Arc<Self>, _origin: &CallOrigin) -> Result<()> {
        let take = |left: usize| left.checked_sub(1);
        match self
            .places
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
        {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::limit_exceeded("no place is left")),
        }
    }

    fn count_call(&self, _origin: &CallOrigin) {
        self.counted.fetch_add(1, Ordering::Relaxed);
    }
}

impl DebugSink for DebugRecorder {
    fn record(&self, agent: Option<&Slug>, body: DebugBody) {
        assert_eq!(agent.map(Slug::as_str), Some("writer"));
        self.events.lock().push(body);
        self.count.send_modify(|count| *count += 1);
    }
}

/// Callers whose tools answer with their arguments; `wait` ends when cancelled, `deaf` never.
#[derive(Default)]
pub struct EchoCallers {
    pub declared: Mutex<Vec<Arc<CallerDeclaration>>>,
    lookups: AtomicUsize,
}

impl EchoCallers {
    /// How often the declarations have been read.
    pub fn lookups(&self) -> usize {
        self.lookups.load(Ordering::Relaxed)
    }

    pub fn declare(&self, context: Value) {
        let declaration = strict::parse_arguments::<caller::CallerContext>(context)
            .unwrap()
            .check()
            .unwrap();
        self.declared.lock().push(declaration.into());
    }
}

#[async_trait]
impl CallerTools for EchoCallers {
    fn declarations(&self) -> Vec<Arc<CallerDeclaration>> {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        self.declared.lock().clone()
    }

    fn may_call(&self, _caller_id: &CallerId, origin: &CallOrigin) -> Result<()> {
        match origin {
            CallOrigin::Outside(who) if who.token_id.is_some() => {
                Err(Error::permission_denied("another's tool"))
            }
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

/// Stand-ins for Oubliette's own tools that answer with their arguments; the one valid key is `good`.
pub struct EchoOwnTools;

#[async_trait]
impl OwnTools for EchoOwnTools {
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
        origin: &CallOrigin,
        tool: &str,
        arguments: JsonObject,
        _ctx: &CallContext,
    ) -> Result<Value> {
        match origin {
            CallOrigin::Inside { api_key } if api_key.as_deref() != Some("good") => {
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

    async fn call_base(
        &self,
        _permit: Permit,
        _session: &SessionId,
        tool: &str,
        _arguments: JsonObject,
        _ctx: &CallContext,
    ) -> Result<Value> {
        Ok(json!({ "base": tool }))
    }
}

/// Keeps each question, and answers as told; until then the call waits.
#[derive(Default)]
pub struct TestApprover {
    pub asked: Mutex<Vec<CallToApprove>>,
    pub answers: tokio::sync::watch::Sender<Option<Result<()>>>,
}

#[async_trait]
impl Approver for TestApprover {
    async fn approve(&self, call: CallToApprove, ctx: &CallContext) -> Result<()> {
        self.asked.lock().push(call);
        let mut answers = self.answers.subscribe();
        tokio::select! {
            answer = answers.wait_for(Option::is_some) => answer.unwrap().clone().unwrap(),
            () = ctx.cancel.cancelled() => Err(Error::unavailable("cancelled")),
        }
    }
}

fn spec(name: &str) -> ToolSpec {
    ToolSpec {
        name: name.into(),
        description: String::new(),
        input_schema: json!({"type":"object"}),
    }
}

/// The path of the program that is both the test MCP server and the sandbox's inner stage.
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

/// A tool plane with everything around it that a session would provide.
pub struct PlaneFixture {
    pub dir: tempfile::TempDir,
    pub recorder: Arc<DebugRecorder>,
    pub lenders: Arc<EchoCallers>,
    pub approver: Arc<TestApprover>,
    pub meter: Arc<TestMeter>,
    pub plane: Arc<ToolPlane>,
    pub sandbox: Arc<dyn SandboxDriver>,
    pub env: HashMap<String, String>,
    pub trust: TrustedResources,
    pub session: SessionId,
}

impl PlaneFixture {
    pub fn new() -> Self {
        Self::with_sandbox(Arc::new(HostDriver::new(program())))
    }

    /// With the real sandbox.
    pub async fn with_local_sandbox() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("run");
        std::fs::create_dir(&run_dir).unwrap();
        let config = LocalDriverConfig {
            client: program(),
            minimum: IsolationLevel::Landlock,
            bwrap: None,
            run_dir,
        };
        let local = LocalDriver::new(config).await.unwrap();
        Self {
            dir,
            ..Self::with_sandbox(Arc::new(local))
        }
        .with_workspace()
    }

    fn with_sandbox(sandbox: Arc<dyn SandboxDriver>) -> Self {
        let (recorder, lenders) = (DebugRecorder::new(), Arc::new(EchoCallers::default()));
        let (session, approver) = (SessionId::generate(), Arc::new(TestApprover::default()));
        let meter = Arc::new(TestMeter {
            places: AtomicUsize::new(usize::MAX),
            counted: AtomicUsize::new(0),
        });
        let plane = ToolPlane::new(ToolPlaneParts {
            session_id: session.clone(),
            callers: lenders.clone(),
            own: Arc::new(EchoOwnTools),
            approver: approver.clone(),
            debug: recorder.clone(),
            meter: meter.clone(),
            thread: CallThread::current_runtime(),
            buffers: Default::default(),
        });
        let dir = tempfile::tempdir().unwrap();
        let (env, trust) = (HashMap::new(), TrustedResources::default());
        Self {
            dir,
            recorder,
            lenders,
            approver,
            meter,
            plane,
            sandbox,
            env,
            trust,
            session,
        }
        .with_workspace()
    }

    fn with_workspace(self) -> Self {
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

    pub async fn build(&self, tools: Value, catalog: &[Value]) -> Result<Arc<AgentContext>> {
        let agent = json!({"name":"W","prompt":"p","tools":tools});
        self.build_agent(agent, catalog).await
    }

    pub async fn build_agent(&self, agent: Value, catalog: &[Value]) -> Result<Arc<AgentContext>> {
        let (definition, catalog, known) = definitions(&agent, catalog);
        let spec = ContextSpec {
            session_id: self.session.clone(),
            definition,
            catalog,
            catalog_ids: known,
            setup: ServerSetup {
                agent: "writer".parse().unwrap(),
                workspace: self.workspace(),
                sandbox: self.sandbox.clone(),
                host: Arc::new(HostDriver::new(program())),
                trust: self.trust.clone().into(),
                limits: ResourceLimits {
                    workspace_mb: Some(32),
                    ..ResourceLimits::default()
                },
                group: None,
                env: Arc::new(self.env.clone()),
                debug: self.recorder.clone(),
                programs: None,
                caches: None,
                proxy: None,
                thread: self.plane.thread().clone(),
                buffers: self.plane.buffers().clone(),
            },
        };
        within_timeout("the build", AgentContext::build(spec)).await
    }

    /// Edits the agent or its catalog while it runs; returns when its servers have followed.
    pub async fn edit(&self, context: &Arc<AgentContext>, tools: Value, catalog: &[Value]) -> Result<()> {
        let (definition, catalog, known) =
            definitions(&json!({"name":"W","prompt":"p","tools":tools}), catalog);
        within_timeout("the edit", context.apply(definition, &catalog, known)?).await;
        Ok(())
    }

    /// Builds a context and installs it in the plane.
    pub async fn install(&self, tools: Value, catalog: &[Value]) -> Arc<AgentContext> {
        let context = self.build(tools, catalog).await.unwrap();
        self.plane.install(context.clone());
        context
    }

    /// Installs one built-in as the only tool, with the alias `it`.
    pub async fn install_builtin(&self, policy: Value) {
        let entry = json!({"id":"b","kind":"builtin","builtinPolicy":policy});
        let name = policy_name(&entry);
        self.install(
            json!({"use":["b"],"aliases":{"it":format!("@b/{name}")}}),
            &[entry],
        )
        .await;
    }

    /// Calls the tool that [`install_builtin`](Self::install_builtin) installed.
    pub async fn call_builtin(&self, arguments: Value) -> Result<CallResult> {
        self.call("it", arguments).await
    }

    pub async fn call(&self, tool: &str, arguments: Value) -> Result<CallResult> {
        self.call_as(RequestedTool::ByName(tool.into()), arguments, from_agent())
            .await
    }

    pub async fn call_as(
        &self,
        tool: impl Into<RequestedTool>,
        arguments: Value,
        origin: CallOrigin,
    ) -> Result<CallResult> {
        let Value::Object(arguments) = arguments else {
            panic!("no object")
        };
        within_timeout(
            "the call",
            self.plane.call(tool, arguments, origin, CallContext::default()),
        )
        .await
        .map_err(Error::from)
    }

    pub fn row(&self, name: &str) -> ListedTool {
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

type ParsedDefinitions = (
    Arc<AgentDefinition>,
    Vec<Arc<ToolDefinition>>,
    Arc<HashSet<CatalogId>>,
);

fn definitions(agent: &Value, catalog: &[Value]) -> ParsedDefinitions {
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

pub fn from_agent() -> CallOrigin {
    CallOrigin::Inside {
        api_key: Some("good".into()),
    }
}

/// Whether a process runs. A zombie that is not reaped yet does not run any more.
pub fn alive(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// A catalog entry with the built-in `fs_read`.
pub fn reader(id: &str) -> Value {
    json!({"id":id,"kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":["."]}})
}

/// A stdio definition of the test server, merged with `more`.
pub fn stdio_server(id: &str, more: Value) -> Value {
    let mut base = json!({"id":id,"kind":"mcp","transport":"stdio","command":program(),
        "timeouts":{"startupMs":60000,"requestMs":60000}});
    base.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    base
}
