//! Resolves a name, checks the agent's rules and makes the [`Permit`]. Permits are made nowhere else.

use std::sync::Arc;

use oubliette_protocol::{
    CallerId, CatalogId, Error,
    caller::{CallerDeclaration, LentTool, full_name},
    id::quoted,
    relay::method,
    tool::{OWN_PREFIX, ToolAddress, ToolRule, ToolSource},
};

use crate::{
    AgentContext, CallOrigin, Permit, RequestedTool, name,
    registry::{NameResolution, ToolRegistry},
};

use super::ToolPlane;

/// A call that passed the gate: its permit and what to dispatch it to.
pub(super) struct AdmittedCall {
    pub(super) permit: Permit,
    pub(super) target: CallTarget,
    pub(super) server: Option<String>,
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
    pub(super) fn admit(
        &self,
        context: &AgentContext,
        requested: &RequestedTool,
        origin: &CallOrigin,
    ) -> Result<AdmittedCall, BlockedCall> {
        let registry = context.registry();
        let gate = Gate {
            plane: self,
            context,
            registry: &registry,
        };
        match requested {
            RequestedTool::At(address) => gate.admit_at(address, origin),
            RequestedTool::ByName(name) => match ToolAddress::of_reserved_name(name) {
                Some(address) => gate.admit_at(&address, origin),
                None => match self.find_lent_by_full_name(name) {
                    Some(lent) => gate.admit_caller(lent, origin),
                    None => gate.admit_catalog(name),
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

struct Gate<'a> {
    plane: &'a ToolPlane,
    context: &'a AgentContext,
    registry: &'a ToolRegistry,
}

impl Gate<'_> {
    fn admit_at(&self, address: &ToolAddress, origin: &CallOrigin) -> Result<AdmittedCall, BlockedCall> {
        match address {
            ToolAddress::Caller { tool, caller_id } => {
                self.admit_caller(self.find_lender(tool, caller_id.as_ref())?, origin)
            }
            ToolAddress::Oubliette(tool) => self.admit_own(tool),
            ToolAddress::Catalog(name) => self.admit_catalog(name),
            ToolAddress::Base(tool) => self.admit_base(tool),
        }
    }

    fn admit_catalog(&self, called: &str) -> Result<AdmittedCall, BlockedCall> {
        match self.registry.resolve(called) {
            NameResolution::Tool(entry) => {
                self.require_allowed(called, &entry.verdict, Some(&entry.canonical))?;
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
                let permit = Permit::grant(entry.canonical.clone(), ToolSource::Catalog);
                Ok(AdmittedCall {
                    permit,
                    target: CallTarget::Catalog(target),
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
                let target = CatalogTarget::Unavailable(format!("{id} is unavailable: {why}"));
                let permit = Permit::grant(called.into(), ToolSource::Catalog);
                Ok(AdmittedCall {
                    permit,
                    target: CallTarget::Catalog(target),
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

    fn admit_caller(&self, lent: FoundLentTool, origin: &CallOrigin) -> Result<AdmittedCall, BlockedCall> {
        let full = full_name(lent.caller_id(), &lent.tool().name);
        self.require_not_denied(&full)?;
        let may = self.plane.parts.callers.may_call(lent.caller_id(), origin);
        may.map_err(|error| BlockedCall::new(error, Some(&full)))?;
        let server = Some(lent.caller_id().to_string());
        let permit = Permit::grant(full.into(), ToolSource::Caller);
        Ok(AdmittedCall {
            permit,
            target: CallTarget::Caller(lent),
            server,
        })
    }

    fn admit_own(&self, tool: &str) -> Result<AdmittedCall, BlockedCall> {
        if tool.len() > name::MAX_TOOL_NAME {
            return Err(self.unknown_tool(tool, "it has no such tool"));
        }
        let full = format!("{OWN_PREFIX}{tool}");
        self.require_not_denied(&full)?;
        let permit = Permit::grant(full.into(), ToolSource::Oubliette);
        Ok(AdmittedCall {
            permit,
            target: CallTarget::Oubliette(tool.to_owned()),
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
            target: CallTarget::Base(tool.to_owned()),
            server: None,
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
                self.not_allowed(called, &verdict.to_string()),
                canonical,
            )),
        }
    }

    fn require_not_denied(&self, full: &str) -> Result<(), BlockedCall> {
        match self.registry.rules().denied_by(full) {
            None => Ok(()),
            Some(pattern) => self.require_allowed(full, &ToolRule::Denied(pattern.to_owned()), Some(full)),
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
