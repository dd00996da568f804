//! Starts what is not running yet of a session: tools, agent process and conversation.

use oubliette_programs::ProgramId;
use oubliette_protocol::{Error, Result, event::SessionStatus};
use oubliette_store::SessionPatch;

use super::{SessionTask, interruption::Interruption};
use crate::{
    agent_plan::AgentPlan,
    agent_process::AgentProcess,
    processes::{self, SessionProcesses},
};

impl SessionTask {
    /// Starts what is not running yet of tools, agent process and conversation.
    pub(super) async fn start_agent(&mut self) -> Result<Result<AgentProcess>, Interruption> {
        self.apply_library_edits().await;
        let env = self.env.clone();
        let agent = self.live.state.borrow().agent.clone();
        let before = self.conversations.get(&agent).cloned();
        let with_tools = self.processes.as_ref().map(|processes| processes.plan.clone());
        let tools_run = with_tools.is_some();
        let building = (!tools_run).then(|| self.env.plane.begin_build());
        let plan = match with_tools {
            Some(plan) => Ok(plan),
            None => AgentPlan::resolve(&env.deps, &self.live.row, &agent).await,
        };
        let checked = plan.and_then(|plan| processes::check_start(&env.deps, &plan).map(|()| plan));
        let plan = match checked {
            Ok(plan) => plan,
            Err(error) => return Ok(Err(self.start_error(error))),
        };
        if let Err(error) = self.install_program(&plan).await? {
            return Ok(Err(self.start_error(error)));
        }
        let work = async move {
            let _building = building;
            match tools_run {
                true => SessionProcesses::start_agent(&env, &plan, before.as_ref())
                    .await
                    .map(|process| (None, process)),
                false => {
                    let mut processes = SessionProcesses::start(&env, plan, before.as_ref()).await?;
                    let process = processes
                        .agent
                        .take()
                        .ok_or_else(|| Error::internal("processes were started without an agent"))?;
                    Ok((Some(processes), process))
                }
            }
        };
        let started = match self.unless_interrupted(Box::pin(work)).await {
            Ok(started) => started,
            Err(interruption) => {
                if self.processes.is_none() {
                    self.env.tear_down_tools().await;
                }
                return Err(interruption);
            }
        };
        Ok(match started {
            Ok((processes, mut process)) => {
                self.processes = processes.or_else(|| self.processes.take());
                self.apply_library_edits().await;
                self.remember_conversation(&process).await;
                self.log_notices(&mut process).await;
                Ok(process)
            }
            Err(error) => Err(self.start_error(error)),
        })
    }

    /// Installs the agent's program if it is not installed. That may take minutes, so the log says what is waited for.
    async fn install_program(&mut self, plan: &AgentPlan) -> Result<Result<()>, Interruption> {
        let deps = self.env.deps.clone();
        let Some(program) = plan.entry.definition.runtime.program() else {
            return Ok(Ok(()));
        };
        if ProgramId::of_spec(program).is_ok_and(|id| deps.program_store.is_installed(&id)) {
            return Ok(Ok(()));
        }
        // A log that cannot be written ends the task; that is noticed where it goes on.
        let reason = format!("{program} is being installed");
        let _ = self.log_status(SessionStatus::Starting, Some(reason)).await;
        let plan = plan.clone();
        let installing = async move { plan.prepare_program(&deps).await.map(drop) };
        let installed = self.unless_interrupted(Box::pin(installing)).await?;
        if installed.is_ok() {
            let _ = self.log_status(SessionStatus::Starting, None).await;
        }
        Ok(installed)
    }

    /// Stores the agent's conversation. If that fails, it is tried again before the next prompt.
    pub(super) async fn remember_conversation(&mut self, process: &AgentProcess) {
        if let Err(error) = self.store_conversation(process).await {
            tracing::error!(session = %self.env.session, error = %error.for_log(), "storing a conversation failed");
        }
    }

    pub(super) async fn store_conversation(&mut self, process: &AgentProcess) -> Result<()> {
        let agent = self.live.state.borrow().agent.clone();
        let isolation = Some(process.level().to_string());
        let mut conversations = self.conversations.clone();
        if let Some(open) = process.conversation() {
            conversations.insert(agent, open.clone());
        }
        let text = serde_json::to_string(&conversations).map_err(Error::internal)?;
        let patch = SessionPatch {
            agent_session: Some(Some(text)),
            isolation: Some(isolation),
            ..SessionPatch::default()
        };
        self.env
            .deps
            .store
            .session_update(&self.env.session, patch)
            .await?;
        self.conversations = conversations;
        Ok(())
    }

    /// Starts the tools without the agent, for calls from outside.
    pub(super) async fn build_tools(&mut self) {
        let env = self.env.clone();
        let agent = self.live.state.borrow().agent.clone();
        let row = self.live.row.clone();
        let building = self.env.plane.begin_build();
        let work = async move {
            let _building = building;
            let plan = AgentPlan::resolve(&env.deps, &row, &agent).await?;
            SessionProcesses::start_tools(&env, plan).await
        };
        let built = match self.live.plane.context() {
            Some(_) => Ok(()),
            None => match self.unless_interrupted(Box::pin(work)).await {
                Ok(Ok(processes)) => {
                    self.processes = Some(processes);
                    Ok(())
                }
                Ok(Err(error)) => Err(self.start_error(error)),
                Err(_) => {
                    self.env.tear_down_tools().await;
                    Err(Error::conflict("the session is over"))
                }
            },
        };
        self.apply_library_edits().await;
        self.answer_tools(&built);
    }

    pub(super) fn answer_tools(&mut self, built: &Result<()>) {
        for reply in self.pending.tools.drain(..) {
            let _ = reply.send(built.clone());
        }
    }
}
