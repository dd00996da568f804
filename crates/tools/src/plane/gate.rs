//! Resolves a name, checks the agent's rules and makes the [`Permit`]. Permits are made nowhere else.

use std::sync::Arc;

use oubliette_protocol::{
    CatalogId, Error,
    caller::{CallerDeclaration, LentTool, full_name},
    id::quoted,
    relay::method,
    tool::ToolSource,
};

use crate::{
    AgentContext, CallOrigin, Permit, Wanted,
    allow::RuleVerdict,
    name,
    registry::{NameResolution, ToolRegistry},
};

use super::ToolPlane;

/// A call that passed the gate: its permit and what to dispatch it to.
pub(super) struct AdmittedCall {
    pub(super) permit: Permit,
    pub(super) target: Target,
    pub(super) server: Option<String>,
}

/// What an admitted call is dispatched to.
pub(super) enum Target {
    Catalog {
        id: CatalogId,
        tool: Arc<str>,
    },
    /// Allowed, but unavailable for this reason.
    Down(String),
    Caller {
        lender: Arc<CallerDeclaration>,
        tool: LentTool,
    },
    Own(String),
    Base(String),
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

/// The source that a name without a stated source belongs to.
enum Kind {
    Base,
    Own,
    Caller(Arc<CallerDeclaration>, LentTool),
    Catalog,
}

impl ToolPlane {
    pub(super) fn admit(
        &self,
        context: &AgentContext,
        wanted: &Wanted,
        origin: &CallOrigin,
    ) -> Result<AdmittedCall, BlockedCall> {
        let registry = context.registry();
        let gate = Gate {
            plane: self,
            context,
            registry: &registry,
        };
        match wanted {
            Wanted::Any(called) => match self.kind(called) {
                Kind::Base => gate.admit_base(called),
                Kind::Own => gate.admit_own(called.strip_prefix(name::OWN_PREFIX).unwrap_or(called)),
                Kind::Caller(lender, tool) => gate.admit_caller(lender, tool, origin),
                Kind::Catalog => gate.admit_catalog(called),
            },
            Wanted::Catalog(called) => gate.admit_catalog(called),
            Wanted::Caller { tool, caller_id } => {
                let (lender, tool) = gate.find_lender(tool, caller_id.as_ref())?;
                gate.admit_caller(lender, tool, origin)
            }
            Wanted::Own(tool) => gate.admit_own(tool),
            Wanted::Base(tool) => gate.admit_base(tool),
        }
    }

    /// The tool that a name refers to when an agent calls it, with its source decided.
    pub fn wanted(&self, called: &str) -> Wanted {
        match self.kind(called) {
            Kind::Base => Wanted::Base(called.into()),
            Kind::Own => Wanted::Own(called.strip_prefix(name::OWN_PREFIX).unwrap_or(called).into()),
            Kind::Caller(lender, tool) => Wanted::Caller {
                tool: tool.name,
                caller_id: Some(lender.caller_id.clone()),
            },
            Kind::Catalog => Wanted::Catalog(called.into()),
        }
    }

    fn kind(&self, called: &str) -> Kind {
        if method::BASE_TOOLS.contains(&called) {
            return Kind::Base;
        }
        if called.starts_with(name::OWN_PREFIX) {
            return Kind::Own;
        }
        let lent = name::split_owner(called).and_then(|(caller, tool)| {
            let all = self.parts.callers.declarations();
            let lender = all
                .into_iter()
                .find(|lender| lender.caller_id.as_str() == caller)?;
            let tool = lender.tools.iter().find(|lent| lent.name == tool)?.clone();
            Some((lender, tool))
        });
        match lent {
            Some((lender, tool)) => Kind::Caller(lender, tool),
            None => Kind::Catalog,
        }
    }
}

struct Gate<'a> {
    plane: &'a ToolPlane,
    context: &'a AgentContext,
    registry: &'a ToolRegistry,
}

impl Gate<'_> {
    fn admit_catalog(&self, called: &str) -> Result<AdmittedCall, BlockedCall> {
        match self.registry.resolve(called) {
            NameResolution::Tool(entry) => {
                self.require_allowed(called, &entry.verdict, Some(&entry.canonical))?;
                // A call to a server that is down is dispatched all the same: it may be restarting, and the call
                // waits for it or fails with the server's own reason.
                let target = match &entry.fault {
                    None => Target::Catalog {
                        id: entry.id.clone(),
                        tool: entry.info.name.clone(),
                    },
                    Some(why) => Target::Down(format!("{} is unavailable: {why}", entry.canonical)),
                };
                let permit = Permit::grant(entry.canonical.clone(), ToolSource::Catalog);
                Ok(AdmittedCall {
                    permit,
                    target,
                    server: Some(entry.id.to_string()),
                })
            }
            NameResolution::Missing {
                id,
                verdict,
                down_reason: down,
            } => {
                self.require_allowed(called, &verdict, None)?;
                let Some(why) = down else {
                    return Err(self.unknown_tool(called, &format!("{id} has no such tool")));
                };
                let target = Target::Down(format!("{id} is unavailable: {why}"));
                let permit = Permit::grant(called.into(), ToolSource::Catalog);
                Ok(AdmittedCall {
                    permit,
                    target,
                    server: Some(id.to_string()),
                })
            }
            NameResolution::NotUsed { id } => {
                let why = format!("tools.use does not name {}", quoted(id));
                let canonical = called.starts_with('@').then_some(called);
                Err(BlockedCall::new(self.not_allowed(called, &why), canonical))
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
    fn find_lender(
        &self,
        tool: &str,
        caller_id: Option<&oubliette_protocol::CallerId>,
    ) -> Result<(Arc<CallerDeclaration>, LentTool), BlockedCall> {
        let all = self.plane.parts.callers.declarations();
        let mut lent = all
            .into_iter()
            .filter(|lender| caller_id.is_none_or(|id| *id == lender.caller_id))
            .filter_map(|lender| {
                let tool = lender.tools.iter().find(|lent| lent.name == tool)?.clone();
                Some((lender, tool))
            });
        match (lent.next(), lent.next()) {
            (Some(one), None) => Ok(one),
            (None, _) => {
                let whose = caller_id.map_or("no caller lends it".to_owned(), |id| {
                    format!("{id} does not lend it")
                });
                let error = Error::not_found(format!("there is no caller tool {}: {whose}", quoted(tool)));
                Err(BlockedCall::new(error, None))
            }
            (Some((first, _)), Some((second, _))) => {
                let error = Error::invalid(format!(
                    "{} is lent by {} and {}: say which with caller_id",
                    quoted(tool),
                    first.caller_id,
                    second.caller_id
                ));
                Err(BlockedCall::new(error, None))
            }
        }
    }

    fn admit_caller(
        &self,
        lender: Arc<CallerDeclaration>,
        tool: LentTool,
        origin: &CallOrigin,
    ) -> Result<AdmittedCall, BlockedCall> {
        let full = full_name(&lender.caller_id, &tool.name);
        self.require_not_denied(&full)?;
        let may = self.plane.parts.callers.may_call(&lender.caller_id, origin);
        may.map_err(|error| BlockedCall::new(error, Some(&full)))?;
        let server = Some(lender.caller_id.to_string());
        let permit = Permit::grant(full.into(), ToolSource::Caller);
        Ok(AdmittedCall {
            permit,
            target: Target::Caller { lender, tool },
            server,
        })
    }

    fn admit_own(&self, tool: &str) -> Result<AdmittedCall, BlockedCall> {
        if tool.len() > name::MAX_TOOL_NAME {
            return Err(self.unknown_tool(tool, "it has no such tool"));
        }
        let full = format!("{}{tool}", name::OWN_PREFIX);
        self.require_not_denied(&full)?;
        let permit = Permit::grant(full.into(), ToolSource::Oubliette);
        Ok(AdmittedCall {
            permit,
            target: Target::Own(tool.to_owned()),
            server: None,
        })
    }

    fn admit_base(&self, tool: &str) -> Result<AdmittedCall, BlockedCall> {
        if !method::BASE_TOOLS.contains(&tool) {
            return Err(self.unknown_tool(tool, "it has no such base tool"));
        }
        self.require_not_denied(tool)?;
        let permit = Permit::grant(tool.into(), ToolSource::Base);
        Ok(AdmittedCall {
            permit,
            target: Target::Base(tool.to_owned()),
            server: None,
        })
    }

    fn require_allowed(
        &self,
        called: &str,
        verdict: &RuleVerdict,
        canonical: Option<&str>,
    ) -> Result<(), BlockedCall> {
        match verdict.allows() {
            true => Ok(()),
            false => Err(BlockedCall::new(
                self.not_allowed(called, &verdict.reason()),
                canonical,
            )),
        }
    }

    fn require_not_denied(&self, full: &str) -> Result<(), BlockedCall> {
        match self.registry.rules().denied_by(full) {
            None => Ok(()),
            Some(pattern) => self.require_allowed(full, &RuleVerdict::Denied(pattern.to_owned()), Some(full)),
        }
    }

    fn not_allowed(&self, called: &str, why: &str) -> Error {
        let agent = self.context.agent();
        Error::not_allowed(format!(
            "agent {agent} may not call {}: {why}",
            display_name(called)
        ))
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

/// A name as error texts show it: unchanged when it is short printable ASCII, else quoted and cut.
fn display_name(called: &str) -> String {
    let plain = (1..=80).contains(&called.len()) && called.bytes().all(|b| b.is_ascii_graphic());
    if plain { called.to_owned() } else { quoted(called) }
}
