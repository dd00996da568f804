//! Name → rules → [`Permit`]. The one place that makes permits.

use std::sync::Arc;

use oubliette_protocol::{
    CatalogId, Error,
    caller::{Declaration, LentTool, full_name},
    id::quoted,
    relay::method,
    tool::Source,
};

use crate::{
    Context, Origin, Permit, Wanted,
    allow::Verdict,
    name,
    registry::{Found, Registry},
};

use super::Plane;

/// Leave to call, and what is to be called.
pub(super) struct Pass {
    pub(super) permit: Permit,
    pub(super) target: Target,
    pub(super) server: Option<String>,
}

/// What is to be called.
pub(super) enum Target {
    Catalog {
        id: CatalogId,
        tool: Arc<str>,
    },
    /// Allowed, but out of reach for now.
    Down(String),
    Caller {
        lender: Arc<Declaration>,
        tool: LentTool,
    },
    Own(String),
    Base(String),
}

/// A call that was stopped.
pub(super) struct Refused {
    pub(super) error: Error,
    pub(super) canonical: Option<String>,
}

impl Refused {
    fn new(error: Error, canonical: Option<&str>) -> Self {
        Self {
            error,
            canonical: canonical.map(str::to_owned),
        }
    }
}

/// Which source a name given without one belongs to.
enum Kind {
    Base,
    Own,
    Caller(Arc<Declaration>, LentTool),
    Catalog,
}

impl Plane {
    pub(super) fn admit(&self, context: &Context, wanted: &Wanted, origin: &Origin) -> Result<Pass, Refused> {
        let registry = context.registry();
        let gate = Gate {
            plane: self,
            context,
            registry: &registry,
        };
        match wanted {
            Wanted::Any(called) => match self.kind(called) {
                Kind::Base => gate.base(called),
                Kind::Own => gate.own(called.strip_prefix(name::OWN_PREFIX).unwrap_or(called)),
                Kind::Caller(lender, tool) => gate.caller(lender, tool, origin),
                Kind::Catalog => gate.catalog(called),
            },
            Wanted::Catalog(called) => gate.catalog(called),
            Wanted::Caller { tool, caller_id } => {
                let (lender, tool) = gate.lender(tool, caller_id.as_ref())?;
                gate.caller(lender, tool, origin)
            }
            Wanted::Own(tool) => gate.own(tool),
            Wanted::Base(tool) => gate.base(tool),
        }
    }

    /// What an agent wants that calls a tool by this name.
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
        if method::BASE.contains(&called) {
            return Kind::Base;
        }
        if called.starts_with(name::OWN_PREFIX) {
            return Kind::Own;
        }
        let lent = name::owner(called).and_then(|(caller, tool)| {
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
    plane: &'a Plane,
    context: &'a Context,
    registry: &'a Registry,
}

impl Gate<'_> {
    fn catalog(&self, called: &str) -> Result<Pass, Refused> {
        match self.registry.resolve(called) {
            Found::Tool(entry) => {
                self.obey(called, &entry.verdict, Some(&entry.canonical))?;
                // A server that is down is asked all the same: it may be on its way back, and knows why not.
                let target = match &entry.fault {
                    None => Target::Catalog {
                        id: entry.id.clone(),
                        tool: entry.info.name.clone(),
                    },
                    Some(why) => Target::Down(format!("{} is unavailable: {why}", entry.canonical)),
                };
                let permit = Permit::grant(entry.canonical.clone(), Source::Catalog);
                Ok(Pass {
                    permit,
                    target,
                    server: Some(entry.id.to_string()),
                })
            }
            Found::Missing { id, verdict, down } => {
                self.obey(called, &verdict, None)?;
                let Some(why) = down else {
                    return Err(self.unknown(called, &format!("{id} has no such tool")));
                };
                let target = Target::Down(format!("{id} is unavailable: {why}"));
                let permit = Permit::grant(called.into(), Source::Catalog);
                Ok(Pass {
                    permit,
                    target,
                    server: Some(id.to_string()),
                })
            }
            Found::NotUsed { id } => {
                let why = format!("tools.use does not name {}", quoted(id));
                let canonical = called.starts_with('@').then_some(called);
                Err(Refused::new(self.not_allowed(called, &why), canonical))
            }
            Found::Unknown => {
                // A denied base tool or lent one is not in the agent's list, so it is asked for here.
                self.undenied(called)?;
                Err(self.unknown(called, "it has no such tool"))
            }
        }
    }

    /// A lent tool by its bare name.
    fn lender(
        &self,
        tool: &str,
        caller_id: Option<&oubliette_protocol::CallerId>,
    ) -> Result<(Arc<Declaration>, LentTool), Refused> {
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
                Err(Refused::new(error, None))
            }
            (Some((first, _)), Some((second, _))) => {
                let error = Error::invalid(format!(
                    "{} is lent by {} and {}: say which with caller_id",
                    quoted(tool),
                    first.caller_id,
                    second.caller_id
                ));
                Err(Refused::new(error, None))
            }
        }
    }

    fn caller(&self, lender: Arc<Declaration>, tool: LentTool, origin: &Origin) -> Result<Pass, Refused> {
        let full = full_name(&lender.caller_id, &tool.name);
        self.undenied(&full)?;
        let may = self.plane.parts.callers.may_call(&lender.caller_id, origin);
        may.map_err(|error| Refused::new(error, Some(&full)))?;
        let server = Some(lender.caller_id.to_string());
        let permit = Permit::grant(full.into(), Source::Caller);
        Ok(Pass {
            permit,
            target: Target::Caller { lender, tool },
            server,
        })
    }

    fn own(&self, tool: &str) -> Result<Pass, Refused> {
        if tool.len() > name::MAX_TOOL {
            return Err(self.unknown(tool, "it has no such tool"));
        }
        let full = format!("{}{tool}", name::OWN_PREFIX);
        self.undenied(&full)?;
        let permit = Permit::grant(full.into(), Source::Oubliette);
        Ok(Pass {
            permit,
            target: Target::Own(tool.to_owned()),
            server: None,
        })
    }

    fn base(&self, tool: &str) -> Result<Pass, Refused> {
        if !method::BASE.contains(&tool) {
            return Err(self.unknown(tool, "it has no such base tool"));
        }
        self.undenied(tool)?;
        let permit = Permit::grant(tool.into(), Source::Base);
        Ok(Pass {
            permit,
            target: Target::Base(tool.to_owned()),
            server: None,
        })
    }

    fn obey(&self, called: &str, verdict: &Verdict, canonical: Option<&str>) -> Result<(), Refused> {
        match verdict.allows() {
            true => Ok(()),
            false => Err(Refused::new(
                self.not_allowed(called, &verdict.reason()),
                canonical,
            )),
        }
    }

    fn undenied(&self, full: &str) -> Result<(), Refused> {
        match self.registry.rules().denies(full) {
            None => Ok(()),
            Some(pattern) => self.obey(full, &Verdict::Denied(pattern.to_owned()), Some(full)),
        }
    }

    fn not_allowed(&self, called: &str, why: &str) -> Error {
        let agent = self.context.agent();
        Error::not_allowed(format!("agent {agent} may not call {}: {why}", cut(called)))
    }

    fn unknown(&self, called: &str, why: &str) -> Refused {
        let agent = self.context.agent();
        let listed = self.registry.listed().map(|entry| entry.name.as_str());
        let near = name::nearest(called, listed);
        let hint = match near.is_empty() {
            true => String::new(),
            false => format!(". Did you mean {}?", near.join(" or ")),
        };
        Refused::new(
            Error::not_found(format!("agent {agent} cannot call {}: {why}{hint}", cut(called))),
            None,
        )
    }
}

/// A name as an error names it: itself when it is plain, else quoted and cut.
fn cut(called: &str) -> String {
    let plain = (1..=80).contains(&called.len()) && called.bytes().all(|b| b.is_ascii_graphic());
    if plain { called.to_owned() } else { quoted(called) }
}
