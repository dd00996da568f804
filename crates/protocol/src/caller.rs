//! The tools a caller lends, and their checks. A declaration is checked completely before anything changes.

use std::{collections::HashSet, sync::Arc};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    CallerId, Error, Result,
    agent::is_tool_name_byte,
    argument_schema::{ArgumentSchema, ArgumentVerdict, CheckEffort, CompileBudget},
    id::quoted,
    tool::any_object_schema,
};

/// Maximum number of tools one caller may lend.
pub(crate) const MAX_CALLER_TOOLS: usize = 1_000;
/// Maximum length of a lent tool's full name (`<caller_id>_<tool>`), in characters.
pub const MAX_FULL_NAME: usize = 64;

/// The `context` argument of `session_message`, not yet checked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(inline)]
pub struct CallerContext {
    /// Name the tools are lent under: a letter, then up to 31 letters, digits and -; not "oubliette". The agent sees
    /// each tool as `<caller_id>_<name>`.
    pub caller_id: String,
    /// The tools you lend, at most 1000; an empty list withdraws them.
    pub caller_tools: Vec<DeclaredTool>,
}

/// One tool of a [`CallerContext`], not yet checked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(inline)]
pub struct DeclaredTool {
    /// Name of the tool, without the caller_id: letters, digits, _ and -. At most 64 characters with the caller_id.
    pub name: String,
    /// What the tool does, for the agent. Default: empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// JSON schema of the arguments, with "type": "object", at most 64 KiB, 64 levels deep, with references into
    /// itself alone. Default: {"type": "object"}.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_schema: Option<Value>,
}

/// A [`CallerContext`] that passed every check of its own.
#[derive(Debug, Clone)]
pub struct CallerDeclaration {
    /// Name the tools are lent under.
    pub caller_id: CallerId,
    /// The tools.
    pub tools: Vec<LentTool>,
}

/// A lent tool with its compiled schema.
#[derive(Debug, Clone)]
pub struct LentTool {
    /// Name without the caller id.
    pub name: String,
    /// What it does.
    pub description: String,
    /// JSON schema of its arguments.
    pub input_schema: Value,
    schema: Arc<ArgumentSchema>,
}

impl LentTool {
    /// Checks a call's arguments against the schema as far as that takes next to no time; `None` if it is not
    /// enough to tell, for large or deeply nested arguments.
    pub fn check_small_arguments(&self, arguments: &Value) -> Option<Result<()>> {
        match self.schema.check(arguments, CheckEffort::Small) {
            ArgumentVerdict::Fit => Some(Ok(())),
            ArgumentVerdict::Misfit(why) => Some(Err(self.misfit(&why))),
            ArgumentVerdict::Unknown => None,
        }
    }

    /// Checks a call's arguments against the schema. May take about a second, and
    /// [`CHECK_STACK_BYTES`](crate::argument_schema::CHECK_STACK_BYTES) of stack.
    pub fn check_arguments(&self, arguments: &Value) -> Result<()> {
        match self.schema.check(arguments, CheckEffort::Full) {
            ArgumentVerdict::Fit => Ok(()),
            ArgumentVerdict::Misfit(why) => Err(self.misfit(&why)),
            ArgumentVerdict::Unknown => Err(Error::limit_exceeded(format!(
                "arguments of {} are too large or nested too deep to be checked against its schema",
                self.name
            ))),
        }
    }

    fn misfit(&self, why: &str) -> Error {
        Error::invalid(format!("arguments of {} do not fit its schema{why}", self.name))
    }

    /// The tool as it was declared, for `caller_tools_config`.
    pub fn declared(&self) -> DeclaredTool {
        DeclaredTool {
            name: self.name.clone(),
            description: Some(self.description.clone()),
            input_schema: Some(self.input_schema.clone()),
        }
    }
}

impl PartialEq for LentTool {
    fn eq(&self, other: &Self) -> bool {
        (&self.name, &self.description, &self.input_schema)
            == (&other.name, &other.description, &other.input_schema)
    }
}

/// The name under which the agent sees a lent tool.
pub fn full_name(caller_id: &CallerId, tool: &str) -> String {
    format!("{caller_id}_{tool}")
}

impl CallerContext {
    /// Checks ids, names and schemas, in bounded time; compiling them takes up to
    /// [`CHECK_STACK_BYTES`](crate::argument_schema::CHECK_STACK_BYTES) of stack. That no other caller or tool of the session has these names is checked by the
    /// session.
    pub fn check(self) -> Result<CallerDeclaration> {
        let caller_id: CallerId = self.caller_id.parse()?;
        if self.caller_tools.len() > MAX_CALLER_TOOLS {
            return Err(Error::invalid(format!(
                "context.caller_tools has {} tools; at most {MAX_CALLER_TOOLS} can be lent",
                self.caller_tools.len()
            )));
        }
        let mut seen = HashSet::new();
        let mut budget = CompileBudget::default();
        let mut tools = Vec::with_capacity(self.caller_tools.len());
        for (i, tool) in self.caller_tools.into_iter().enumerate() {
            let at = |why: String| Error::invalid(format!("context.caller_tools[{i}]: {why}"));
            if tool.name.is_empty() || !tool.name.bytes().all(is_tool_name_byte) {
                return Err(at(format!(
                    "{} is not a tool name: use letters, digits, _ and -",
                    quoted(&tool.name)
                )));
            }
            let full = full_name(&caller_id, &tool.name);
            if full.len() > MAX_FULL_NAME {
                return Err(at(format!(
                    "{} is longer than {MAX_FULL_NAME} characters",
                    quoted(&full)
                )));
            }
            if !seen.insert(tool.name.clone()) {
                return Err(at(format!("{} is declared twice", quoted(&tool.name))));
            }
            let input_schema = tool.input_schema.unwrap_or_else(any_object_schema);
            let schema = ArgumentSchema::compile(&input_schema, &mut budget)
                .map_err(|why| at(format!("the inputSchema of {} {why}", tool.name)))?;
            tools.push(LentTool {
                name: tool.name,
                description: tool.description.unwrap_or_default(),
                input_schema,
                schema: schema.into(),
            });
        }
        Ok(CallerDeclaration { caller_id, tools })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn declare(context: Value) -> Result<CallerDeclaration> {
        crate::strict::parse_arguments::<CallerContext>(context)?.check()
    }

    #[test]
    fn every_invalid_declaration_is_refused() {
        let good = json!({"caller_id":"myapp","caller_tools":[{"name":"send"},{"name":"ask","inputSchema":{"type":"object"}}]});
        assert_eq!(declare(good).unwrap().tools.len(), 2);
        for bad in [
            json!({"caller_id":"oubliette","caller_tools":[]}),
            json!({"caller_id":"my_app","caller_tools":[]}),
            json!({"caller_id":"a","caller_tools":[{"name":"x"},{"name":"x"}]}),
            json!({"caller_id":"a","caller_tools":[{"name":"x y"}]}),
            json!({"caller_id":"a","caller_tools":[{"name":""}]}),
            json!({"caller_id":"a","caller_tools":[{"name":"x".repeat(63)}]}),
            json!({"caller_id":"a","caller_tools":[{"name":"x","inputSchema":{"type":"string"}}]}),
            json!({"caller_id":"a","caller_tools":[{"name":"x","inputSchema":{"type":"object","properties":3}}]}),
            json!({"caller_id":"a","caller_tools":[{"name":"x","extra":1}]}),
            json!({"caller_id":"a"}),
        ] {
            assert!(declare(bad.clone()).is_err(), "{bad}");
        }
    }

    #[test]
    fn arguments_are_checked_against_the_schema() {
        let schema =
            json!({"type":"object","properties":{"message":{"type":"string"}},"required":["message"]});
        let lent =
            declare(json!({"caller_id":"a","caller_tools":[{"name":"x","inputSchema":schema}]})).unwrap();
        assert!(lent.tools[0].check_arguments(&json!({"message":"hi"})).is_ok());
        assert!(lent.tools[0].check_arguments(&json!({"message":1})).is_err());
        assert!(lent.tools[0].check_arguments(&json!({})).is_err());
    }
}
