//! Sessions with a real store, home directory and library, and real agent processes without a sandbox.

#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "shared by several tests"
)]

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use oubliette_egress::{
    EgressProxy, GatewayLimits, ModelGateway, ProxyLimits, ServiceGateway, ServiceLimits,
};
use oubliette_home::{DefinitionLibrary, HomeDir};
use oubliette_programs::{InstallLimits, ProgramStore};
use oubliette_protocol::{
    ByteBudget, JsonObject, Principal, ProjectId, Result, Scope, SessionId, TokenId, WorkspaceId,
    event::{EventBody, SessionEvent, SessionStatus},
    tool::ToolSpec,
};
use oubliette_sandbox::HostDriver;
use oubliette_session::{
    EventsQuery, IncludeChildren, KeyMinter, MessageReply, MessageRequest, ProgramPaths, RelayDoor,
    RequestOrigin, SessionConfig, SessionDeps, Sessions, WaitMode, WorkspaceChoice, WorkspaceMaker,
};
use oubliette_store::{OpenError, ProjectRow, Store, WorkspaceRow};
use oubliette_tools::{
    CallContext, CallOrigin, CallThreads, OwnTools, Permit, ProcessEnvironment, TrustedResources,
};
use serde_json::{Value, json};

/// A session manager on a temporary home directory with one project and six test agents.
pub struct SessionFixture {
    pub sessions: Arc<Sessions>,
    pub store: Store,
    pub home: Arc<HomeDir>,
    pub library: Arc<DefinitionLibrary>,
    pub project: ProjectId,
    dir: Arc<tempfile::TempDir>,
    config: SessionConfig,
}

/// The home directory of a fixture whose tasks were dropped.
pub struct LeftoverHome {
    dir: Arc<tempfile::TempDir>,
    config: SessionConfig,
    project: ProjectId,
}

pub fn fake_agent() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let program = exe.parent().unwrap().parent().unwrap().join("examples/fake_acp");
    assert!(
        program.exists(),
        "cargo builds the examples with the tests: {}",
        program.display()
    );
    program
}

impl SessionFixture {
    pub async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(change: impl FnOnce(&mut SessionConfig)) -> Self {
        let mut config = SessionConfig {
            cancel_grace: Duration::from_millis(300),
            // The fake agents start no MCP server.
            tools_connect_timeout: Duration::from_secs(3600),
            ..SessionConfig::default()
        };
        change(&mut config);
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let fixture = Self::open(dir, config, None).await;
        for how in ["ok", "other", "mute", "dies", "rubbish", "flood"] {
            fixture.agent(how, how, json!({})).await;
        }
        let workspace = WorkspaceId::generate();
        let now = oubliette_store::now();
        let project = ProjectRow {
            project_id: fixture.project.clone(),
            name: "p".into(),
            description: String::new(),
            agent: Some("ok".parse().unwrap()),
            env: [("FROM_PROJECT".to_owned(), "yes".to_owned())].into(),
            api_key_scope: None,
            sandbox: json!({}),
            limits: json!({"max_sessions": 4}),
            default_workspace: workspace.clone(),
            workspaces: oubliette_protocol::WorkspacePolicy::Shared,
            created_at: now,
            updated_at: now,
        };
        let row = WorkspaceRow {
            workspace_id: workspace.clone(),
            project_id: fixture.project.clone(),
            name: "w".into(),
            env: [("FROM_WORKSPACE".to_owned(), "yes".to_owned())].into(),
            source: None,
            created_at: now,
        };
        std::fs::create_dir_all(fixture.home.workspace_dir(&fixture.project, &workspace)).unwrap();
        fixture.store.project_create(project, row).await.unwrap();
        fixture
    }

    async fn open(dir: Arc<tempfile::TempDir>, config: SessionConfig, project: Option<ProjectId>) -> Self {
        let home = Arc::new(HomeDir::at(dir.path().join("home")).unwrap());
        home.create().unwrap();
        let store = loop {
            match Store::open(&home.database_path()).await {
                // A process just forked by another test has inherited the lock's descriptor, and holds it
                // until it calls exec.
                Err(OpenError::InUse(_)) => tokio::task::yield_now().await,
                opened => break opened.unwrap(),
            }
        };
        let library = DefinitionLibrary::open(&home).unwrap();
        let client = fake_agent();
        let sandbox = Arc::new(HostDriver::new(client.clone()));
        let sessions = Sessions::new(SessionDeps {
            store: store.clone(),
            home: home.clone(),
            library: library.clone(),
            sandbox: sandbox.clone(),
            host: sandbox,
            gateway: ModelGateway::new(Vec::new(), GatewayLimits::default()).unwrap(),
            services: ServiceGateway::new(Vec::new(), ServiceLimits::default()).unwrap(),
            proxy: EgressProxy::new(Vec::new(), ProxyLimits::default()).unwrap(),
            trust: Arc::new(TrustedResources::default()),
            env: Arc::new(ProcessEnvironment),
            threads: Arc::new(CallThreads::new(2)),
            config: config.clone().into(),
            buffers: ByteBudget::default(),
            door: Arc::new(NoRelayDoor),
            keys: Arc::new(StubKeys),
            workspaces: Arc::new(StubKeys),
            program_store: ProgramStore::reader(
                home.clone(),
                Arc::new(HostDriver::new(client.clone())),
                InstallLimits::default(),
                |_| None,
            ),
            programs: ProgramPaths {
                client: client.clone(),
                agent: client,
            },
        });
        sessions.set_own_tools(Arc::new(NoOwnTools));
        Self {
            sessions,
            store,
            home,
            library,
            project: project.unwrap_or_else(ProjectId::generate),
            dir,
            config,
        }
    }

    /// Gives up everything but the home directory, as when the server is killed.
    pub fn into_leftover_home(self) -> LeftoverHome {
        LeftoverHome {
            dir: self.dir.clone(),
            config: self.config.clone(),
            project: self.project.clone(),
        }
    }

    /// Opens a leftover home again and recovers its sessions.
    pub async fn reopen(leftover: LeftoverHome) -> Self {
        let fixture = Self::open(leftover.dir, leftover.config, Some(leftover.project)).await;
        fixture.sessions.recover().await.unwrap();
        fixture
    }

    pub async fn agent(&self, slug: &str, how: &str, more: Value) {
        let command = [fake_agent().to_string_lossy().into_owned(), how.to_owned()];
        let mut definition = json!({
            "name": slug, "prompt": "p", "runtime": {"kind": "acp", "command": command},
        });
        definition
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        self.library
            .agent_put(slug.parse().unwrap(), definition, BTreeMap::new())
            .await
            .unwrap();
    }

    pub fn request(&self, agent: &str, text: &str) -> MessageRequest {
        MessageRequest {
            principal: Principal::owner(),
            origin: RequestOrigin::Outside,
            message: text.into(),
            project_id: Some(self.project.clone()),
            session_id: None,
            agent: Some(agent.parse().unwrap()),
            workspace: WorkspaceChoice::Default,
            context: None,
            mcp_session: None,
            wait: WaitMode::ForTurn,
        }
    }

    pub async fn start(&self, agent: &str, text: &str) -> Result<MessageReply> {
        self.sessions.message(self.request(agent, text)).await
    }

    pub async fn start_without_waiting(&self, agent: &str, text: &str) -> SessionId {
        let request = MessageRequest {
            wait: WaitMode::No,
            ..self.request(agent, text)
        };
        self.sessions.message(request).await.unwrap().session_id
    }

    pub async fn send(&self, session: &SessionId, text: &str) -> MessageReply {
        let request = MessageRequest {
            session_id: Some(session.clone()),
            agent: None,
            wait: WaitMode::No,
            ..self.request("ok", text)
        };
        self.sessions.message(request).await.unwrap()
    }

    pub async fn send_and_wait(&self, session: &SessionId, text: &str) -> Result<MessageReply> {
        let request = MessageRequest {
            session_id: Some(session.clone()),
            agent: None,
            ..self.request("ok", text)
        };
        self.sessions.message(request).await
    }

    pub async fn log(&self, session: &SessionId) -> Vec<Arc<SessionEvent>> {
        self.store.events().read(session, -1, 100_000).await.unwrap()
    }

    /// One short text for each event of the log except deltas.
    pub async fn log_summary(&self, session: &SessionId) -> Vec<String> {
        let log = self.log(session).await;
        log.iter()
            .filter(|e| e.body.kind() != "delta")
            .map(|e| summarize(&e.body))
            .collect()
    }

    /// Waits until the log has an event for which `fits` is true.
    pub async fn wait_for_event(
        &self,
        session: &SessionId,
        fits: impl Fn(&EventBody) -> bool,
    ) -> Arc<SessionEvent> {
        let mut since = -1;
        loop {
            let query = EventsQuery {
                session_id: session.clone(),
                since_index: since,
                max_events: 1000,
                wait: Duration::from_secs(50),
                children: IncludeChildren::No,
            };
            let reply = self.sessions.events(&Principal::owner(), query).await.unwrap();
            assert!(
                !reply.events.is_empty(),
                "nothing came: {:?}",
                self.log_summary(session).await
            );
            since = reply.last_index;
            if let Some(event) = reply.events.iter().find(|e| fits(&e.body)) {
                return event.clone();
            }
        }
    }

    pub async fn wait_for_status(&self, session: &SessionId, wanted: SessionStatus) {
        self.wait_for_event(
            session,
            |body| matches!(body, EventBody::Status { status, .. } if *status == wanted),
        )
        .await;
    }

    pub async fn debugger(&self, session: &SessionId) -> Vec<String> {
        self.store.debugger().flush().await;
        let filter = oubliette_store::DebugFilter {
            session: Some(session.clone()),
            ..Default::default()
        };
        let events = self.store.debugger().read(&filter, -1, 10_000).await.unwrap();
        events.iter().map(|e| e.body.kind().to_owned()).collect()
    }
}

pub fn summarize(body: &EventBody) -> String {
    match body {
        EventBody::Status { status, .. } => status.to_string(),
        EventBody::Message { role, text } => format!("{role:?}: {text}").to_lowercase(),
        EventBody::TurnCompleted {
            turn, stop_reason, ..
        } => format!("turn {turn} {stop_reason}"),
        EventBody::Error { code, .. } => format!("error {code}"),
        other => other.kind().to_owned(),
    }
}

pub fn write_token() -> Principal {
    Principal {
        token_id: Some(TokenId::generate()),
        scope: Scope::Write,
        project: None,
        inside: None,
    }
}

struct NoRelayDoor;

impl RelayDoor for NoRelayDoor {
    fn accept(&self, _: SessionId, _: oubliette_os::UntrustedSocket, _: ByteBudget) {}
}

struct StubKeys;

#[async_trait]
impl KeyMinter for StubKeys {
    async fn mint(&self, _: &SessionId, _: &ProjectId, _: Scope) -> Result<String> {
        Ok("oub_minted".into())
    }

    async fn revoke(&self, _: &SessionId) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl WorkspaceMaker for StubKeys {
    async fn create(&self, _: &ProjectId) -> Result<WorkspaceId> {
        Err(oubliette_protocol::Error::unavailable("not in this test"))
    }
}

struct NoOwnTools;

#[async_trait]
impl OwnTools for NoOwnTools {
    async fn list(&self, _: &SessionId, _: &str) -> Result<Vec<ToolSpec>> {
        Ok(Vec::new())
    }

    async fn call(
        &self,
        _: Permit,
        _: &SessionId,
        _: &CallOrigin,
        _: &str,
        _: JsonObject,
        _: &CallContext,
    ) -> Result<Value> {
        Ok(Value::Null)
    }

    fn base_specs(&self) -> Vec<ToolSpec> {
        Vec::new()
    }

    async fn call_base(
        &self,
        _: Permit,
        _: &SessionId,
        _: &str,
        _: JsonObject,
        _: &CallContext,
    ) -> Result<Value> {
        Ok(Value::Null)
    }
}
