//! Resolves a name, checks the agent's rules and makes the [`Permit`]. Permits are made nowhere else.
//!
//! Of the rules, `find` checks what holds whatever the arguments are; only where a rule looks at the arguments does
//! `judge` check the rest.

use std::sync::Arc;

use oubliette_protocol::{
    CallerId, CatalogId, Error, JsonObject,
    caller::{CallerDeclaration, LentTool, full_name},
    id::quoted,
    relay::method,
    tool::{OWN_PREFIX, ToolAddress, ToolRule, ToolSource},
};

use crate::{
    AgentContext, CallContext, CallOrigin, CallToApprove, Permit, RequestedTool,
    call_rules::{ArgumentRules, CallJudgement},
    name,
    registry::{NameResolution, ToolRegistry},
};

use super::{ToolPlane, argument_check::judge_arguments, in_flight::InFlightCall, truncate_name};

/// A call that passed the gate: its permit and what to dispatch it to.
pub(super) struct AdmittedCall {
    pub(super) permit: Permit,
    pub(super) target: CallTarget,
    pub(super) server: Option<String>,
}

/// A tool that the agent may call, with some arguments at least.
struct FoundTool {
    canonical: Arc<str>,
    source: ToolSource,
    target: CallTarget,
    server: Option<String>,
    /// The rules that look at the arguments of a call; `None` if there are none.
    by_arguments: Option<Arc<ArgumentRules>>,
}

impl FoundTool {
    fn permit(self) -> AdmittedCall {
        AdmittedCall {
            permit: Permit::grant(self.canonical, self.source),
            target: self.target,
            server: self.server,
        }
    }
}

/// What an admitted call is dispatched to, by source.
pub(super) enum CallTarget {
    Caller(FoundLentTool),
    Oubliette(String),
    Catalog(CatalogTarget),
    Base(String),
}

/// A catalog tool that the agent may call.
pub(super) enum CatalogTarget {
    /// It is called at this entry, which may be restarting.
    Entry { id: CatalogId, tool: Arc<str> },
    /// No call can reach it, for this reason.
    Unavailable(String),
}

/// A lent tool that was found in a caller's declaration.
#[derive(Clone)]
pub(super) struct FoundLentTool {
    declaration: Arc<CallerDeclaration>,
    index: usize,
}

impl FoundLentTool {
    pub(super) fn caller_id(&self) -> &CallerId {
        &self.declaration.caller_id
    }

    pub(super) fn tool(&self) -> &LentTool {
        &self.declaration.tools[self.index]
    }
}

/// A call that the gate blocked.
pub(super) struct BlockedCall {
    pub(super) error: Error,
    pub(super) canonical: Option<String>,
}

impl BlockedCall {
    fn new(error: Error, canonical: Option<&str>) -> Self {
        Self {
            error,
            canonical: canonical.map(str::to_owned),
        }
    }
}

impl ToolPlane {
    /// Passes a call through the gate: name → alias → denied → allowed → budget → ask → permit. Gives the arguments back.
    /// A call that a person is asked about waits here until it is decided or cancelled.
    pub(super) async fn admit(
        &self,
        context: &AgentContext,
        requested: &RequestedTool,
        origin: &CallOrigin,
        arguments: JsonObject,
        call: (&InFlightCall<'_>, &CallContext),
    ) -> Result<(AdmittedCall, JsonObject), BlockedCall> {
        let found = self.find(context, requested, origin)?;
        match &found.by_arguments {
            None => {
                self.reserve(&found, origin)?;
                Ok((found.permit(), arguments))
            }
            // Boxed to keep the futures of the other calls small.
            Some(_) => Box::pin(self.admit_judged(context, requested, origin, arguments, found, call)).await,
        }
    }

    /// The part of [`admit`](Self::admit) for tools whose calls are judged one by one.
    async fn admit_judged(
        &self,
        context: &AgentContext,
        requested: &RequestedTool,
        origin: &CallOrigin,
        mut arguments: JsonObject,
        mut found: FoundTool,
        call: (&InFlightCall<'_>, &CallContext),
    ) -> Result<(AdmittedCall, JsonObject), BlockedCall> {
        // The tool that a person has allowed to be called with these arguments.
        let mut approved: Option<Arc<str>> = None;
        let mut has_place = false;
        while let Some(rules) = found.by_arguments.clone() {
            let canonical = found.canonical.clone();
            let blocked = |error: Error| BlockedCall::new(error, Some(&canonical));
            let judged = judge_arguments(rules, arguments, &self.large_checks).await;
            let (judgement, judged_arguments) = judged.map_err(blocked)?;
            arguments = judged_arguments;
            let called = match found.source {
                ToolSource::Catalog => requested.name(),
                ToolSource::Caller | ToolSource::Oubliette | ToolSource::Base => &canonical,
            };
            match judgement {
                CallJudgement::Allowed => break,
                CallJudgement::Blocked(rule) => {
                    return Err(blocked(not_allowed(context, called, &rule.to_string())));
                }
                CallJudgement::Ask(_) if approved.as_ref() == Some(&canonical) => break,
                CallJudgement::Ask(rules) => {
                    // First, so that nobody is asked about a call that is then refused all the same.
                    if !std::mem::replace(&mut has_place, true) {
                        self.reserve(&found, origin)?;
                    }
                    let question = CallToApprove {
                        agent: context.agent().clone(),
                        tool: truncate_name(called),
                        canonical: canonical.to_string(),
                        source: found.source.into(),
                        arguments: self.masked_arguments(context, found.source, &arguments),
                        rules: rules.iter().map(|rule| rule.to_json()).collect(),
                    };
                    let (in_flight_call, ctx) = call;
                    let waiting = std::pin::pin!(self.parts.approver.approve(question, ctx));
                    in_flight_call.run(waiting).await.map_err(blocked)?;
                    // Found and judged again: rules and aliases may have been edited while the call waited.
                    approved = Some(canonical.clone());
                    found = self.find(context, requested, origin)?;
                }
            }
        }
        if !has_place {
            self.reserve(&found, origin)?;
        }
        Ok((found.permit(), arguments))
    }

    /// Takes the call's place in the budget of its turn.
    fn reserve(&self, found: &FoundTool, origin: &CallOrigin) -> Result<(), BlockedCall> {
        let reserved = self.parts.meter.clone().reserve_call(origin);
        reserved.map_err(|error| BlockedCall::new(error, Some(&found.canonical)))
    }

    /// Finds the tool that a name means, and checks the rules that hold whatever the arguments are.
    fn find(
        &self,
        context: &AgentContext,
        requested: &RequestedTool,
        origin: &CallOrigin,
    ) -> Result<FoundTool, BlockedCall> {
        let registry = context.registry();
        let gate = CallGate {
            plane: self,
            context,
            registry: &registry,
        };
        match requested {
            RequestedTool::At(address) => gate.find_at(address, origin),
            RequestedTool::ByName(name) => match ToolAddress::of_reserved_name(name) {
                Some(address) => gate.find_at(&address, origin),
                None => match self.find_lent_by_full_name(name) {
                    Some(lent) => gate.find_caller_tool(lent, origin),
                    None => gate.find_catalog_tool(name),
                },
            },
        }
    }

    fn find_lent_by_full_name(&self, full_name: &str) -> Option<FoundLentTool> {
        let (caller, tool) = name::split_owner(full_name)?;
        self.find_lent(tool, Some(caller)).next()
    }

    /// The lent tools of this name: those of one caller, or of all.
    fn find_lent<'a>(
        &self,
        tool: &'a str,
        caller: Option<&'a str>,
    ) -> impl Iterator<Item = FoundLentTool> + use<'a> {
        let declarations = self.parts.callers.declarations().into_iter();
        declarations
            .filter(move |declaration| caller.is_none_or(|id| declaration.caller_id.as_str() == id))
            .filter_map(move |declaration| {
                let index = declaration.tools.iter().position(|lent| lent.name == tool)?;
                Some(FoundLentTool { declaration, index })
            })
    }
}

struct CallGate<'a> {
    plane: &'a ToolPlane,
    context: &'a AgentContext,
    registry: &'a ToolRegistry,
}

impl CallGate<'_> {
    fn find_at(&self, address: &ToolAddress, origin: &CallOrigin) -> Result<FoundTool, BlockedCall> {
        match address {
            ToolAddress::Caller { tool, caller_id } => {
                self.find_caller_tool(self.find_lender(tool, caller_id.as_ref())?, origin)
            }
            ToolAddress::Oubliette(tool) => self.find_own_tool(tool),
            ToolAddress::Catalog(name) => self.find_catalog_tool(name),
            ToolAddress::Base(tool) => self.find_base_tool(tool),
        }
    }

    fn find_catalog_tool(&self, called: &str) -> Result<FoundTool, BlockedCall> {
        match self.registry.resolve(called) {
            NameResolution::Tool(entry) => {
                self.require_allowed(called, &entry.rules.verdict, Some(&entry.canonical))?;
                // A call to a server that is down is dispatched all the same: it may be restarting, and the call
                // waits for it or fails with the server's own reason.
                let target = match &entry.fault {
                    None => CatalogTarget::Entry {
                        id: entry.id.clone(),
                        tool: entry.info.name.clone(),
                    },
                    Some(why) => {
                        CatalogTarget::Unavailable(format!("{} is unavailable: {why}", entry.canonical))
                    }
                };
                Ok(FoundTool {
                    canonical: entry.canonical.clone(),
                    source: ToolSource::Catalog,
                    target: CallTarget::Catalog(target),
                    server: Some(entry.id.to_string()),
                    by_arguments: entry.rules.by_arguments().cloned(),
                })
            }
            NameResolution::Missing {
                id,
                rules,
                down_reason: down,
            } => {
                self.require_allowed(called, &rules.verdict, None)?;
                let Some(why) = down else {
                    return Err(self.unknown_tool(called, &format!("{id} has no such tool")));
                };
                let target = CatalogTarget::Unavailable(format!("{id} is unavailable: {why}"));
                Ok(FoundTool {
                    canonical: called.into(),
                    source: ToolSource::Catalog,
                    target: CallTarget::Catalog(target),
                    server: Some(id.to_string()),
                    // Nothing is there to be called, so no arguments have to be judged.
                    by_arguments: None,
                })
            }
            NameResolution::NotUsed { id } => {
                let why = format!("tools.use does not name {}", quoted(id));
                let canonical = called.starts_with('@').then_some(called);
                Err(BlockedCall::new(
                    not_allowed(self.context, called, &why),
                    canonical,
                ))
            }
            NameResolution::Unknown => {
                // A denied base or lent tool is not in the agent's list, so a client may ask for it as a catalog
                // tool: the answer is then that it is denied, not that it does not exist.
                self.require_not_denied(called)?;
                Err(self.unknown_tool(called, "it has no such tool"))
            }
        }
    }

    /// Finds the one caller that lends a tool of this unprefixed name.
    fn find_lender(&self, tool: &str, caller_id: Option<&CallerId>) -> Result<FoundLentTool, BlockedCall> {
        let mut found = self.plane.find_lent(tool, caller_id.map(CallerId::as_str));
        match (found.next(), found.next()) {
            (Some(one), None) => Ok(one),
            (None, _) => {
                let whose = caller_id.map_or("no caller lends it".to_owned(), |id| {
                    format!("{id} does not lend it")
                });
                let error = Error::not_found(format!("there is no caller tool {}: {whose}", quoted(tool)));
                Err(BlockedCall::new(error, None))
            }
            (Some(first), Some(second)) => {
                let error = Error::invalid(format!(
                    "{} is lent by {} and {}: say which with caller_id",
                    quoted(tool),
                    first.caller_id(),
                    second.caller_id()
                ));
                Err(BlockedCall::new(error, None))
            }
        }
    }

    fn find_caller_tool(&self, lent: FoundLentTool, origin: &CallOrigin) -> Result<FoundTool, BlockedCall> {
        let full = full_name(lent.caller_id(), &lent.tool().name);
        let by_arguments = self.require_not_denied(&full)?;
        let may = self.plane.parts.callers.may_call(lent.caller_id(), origin);
        may.map_err(|error| BlockedCall::new(error, Some(&full)))?;
        let server = Some(lent.caller_id().to_string());
        Ok(FoundTool {
            canonical: full.into(),
            source: ToolSource::Caller,
            target: CallTarget::Caller(lent),
            server,
            by_arguments,
        })
    }

    fn find_own_tool(&self, tool: &str) -> Result<FoundTool, BlockedCall> {
        if tool.len() > name::MAX_TOOL_NAME {
            return Err(self.unknown_tool(tool, "it has no such tool"));
        }
        let full = format!("{OWN_PREFIX}{tool}");
        let by_arguments = self.require_not_denied(&full)?;
        Ok(FoundTool {
            canonical: full.into(),
            source: ToolSource::Oubliette,
            target: CallTarget::Oubliette(tool.to_owned()),
            server: None,
            by_arguments,
        })
    }

    fn find_base_tool(&self, tool: &str) -> Result<FoundTool, BlockedCall> {
        if !method::BASE_TOOLS.contains(&tool) {
            return Err(self.unknown_tool(tool, "it has no such base tool"));
        }
        let by_arguments = self.require_not_denied(tool)?;
        Ok(FoundTool {
            canonical: tool.into(),
            source: ToolSource::Base,
            target: CallTarget::Base(tool.to_owned()),
            server: None,
            by_arguments,
        })
    }

    fn require_allowed(
        &self,
        called: &str,
        verdict: &ToolRule,
        canonical: Option<&str>,
    ) -> Result<(), BlockedCall> {
        match verdict.allows() {
            true => Ok(()),
            false => Err(BlockedCall::new(
                not_allowed(self.context, called, &verdict.to_string()),
                canonical,
            )),
        }
    }

    /// Checks the rules of a tool that is not from the catalog. Returns those that look at a call's arguments.
    fn require_not_denied(&self, full: &str) -> Result<Option<Arc<ArgumentRules>>, BlockedCall> {
        let rules = self.registry.rules();
        if rules.govern_catalog_alone() {
            return Ok(None);
        }
        // Whether it may be called at all is for its source to say; here it matters only that nothing denies it.
        let rules = rules.of_other_tool(full, ToolRule::BaseTool);
        self.require_allowed(full, &rules.verdict, Some(full))?;
        Ok(rules.by_arguments().cloned())
    }

    fn unknown_tool(&self, called: &str, why: &str) -> BlockedCall {
        let agent = self.context.agent();
        let listed = self.registry.listed().map(|entry| entry.name.as_str());
        let near = name::nearest(called, listed);
        let hint = match near.is_empty() {
            true => String::new(),
            false => format!(". Did you mean {}?", near.join(" or ")),
        };
        BlockedCall::new(
            Error::not_found(format!(
                "agent {agent} cannot call {}: {why}{hint}",
                display_name(called)
            )),
            None,
        )
    }
}

fn not_allowed(context: &AgentContext, called: &str, why: &str) -> Error {
    let agent = context.agent();
    Error::not_allowed(format!(
        "agent {agent} may not call {}: {why}",
        display_name(called)
    ))
}

/// A name as error texts show it: unchanged when it is short printable ASCII, else quoted and cut.
fn display_name(called: &str) -> String {
    let plain = (1..=80).contains(&called.len()) && called.bytes().all(|b| b.is_ascii_graphic());
    if plain { called.to_owned() } else { quoted(called) }
}
