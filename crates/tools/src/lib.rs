//! The tool plane: the one gate between an agent and every tool, whatever its source.
//!
//! It knows no session and no HTTP. Callers and Oubliette's own tools are reached through the traits in
//! [`ports`], MCP servers through [`upstream`], processes through `oubliette-sandbox`.
//!
//! In the order a call passes them:
//!
//! - [`call`]: which tool is called ([`RequestedTool`]), by whom ([`CallOrigin`]), with which cancellation and progress
//!   sink ([`CallContext`]).
//! - [`plane`]: [`ToolPlane`], one per session: name → rules → [`Permit`] → source → debugger.
//! - [`registry`]: every name of every catalog tool, and which tool gets a name that two claim;
//!   [`name`] builds and bounds names, [`allow`] compiles an agent's `allowed` and `denied`, with [`pattern_list`];
//!   [`call_rules`]: the rules that touch one tool, and what they say of one call.
//! - [`permit`]: the value without which no source can be dispatched to.
//! - [`context`]: [`AgentContext`], one running agent's servers and registry: built, kept current, torn down.
//! - [`upstream`]: MCP servers over stdio, ws, tcp and http. [`builtin`]: `fs_read`, `fs_write`, `shell_exec`.
//! - [`thread`]: the threads that run tool calls; [`stderr_tail`]: the end of a process's stderr.
//! - [`trust`]: the host resources that `oubliette.toml` allows; [`secret`]: values that are masked in all output.
//! - [`mod@explain`]: whether and why an agent may call a tool, in a sentence.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod allow;
pub mod builtin;
pub mod call;
pub mod call_rules;
pub mod context;
pub mod explain;
pub mod name;
pub mod pattern_list;
pub mod permit;
pub mod plane;
pub mod ports;
pub mod registry;
pub mod secret;
pub mod stderr_tail;
pub mod thread;
pub mod trust;
pub mod upstream;

pub use call::{CallContext, CallOrigin, RequestedTool};
pub use call_rules::{CallJudgement, CallRules};
pub use context::{AgentContext, ContextSpec};
pub use explain::{explain, explain_call, judge_other_tools, preview, preview_known};
pub use permit::Permit;
pub use plane::{ContextBuilding, ToolCallError, ToolPlane, ToolPlaneParts};
pub use ports::{
    Approver, CallMeter, CallToApprove, CallerTools, DebugSink, DiscardDebug, OwnTools, ProxySockets,
};
pub use secret::{Secrets, without_url_credentials};
pub use stderr_tail::StderrTail;
pub use thread::{CallThread, CallThreads};
pub use trust::{ProcessEnvironment, ServerEnvironment, TrustTable, TrustedResources};
pub use upstream::ServerSetup;
