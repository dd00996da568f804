//! Durations in configuration and arguments, written as a number and a unit: `"500ms"`, `"2s"`, `"30d"`.

use std::{str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{Error, Result, id::quoted};

/// A duration that is read and written as a whole number and one unit: ms, s, m, h or d.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HumanDuration(pub Duration);

/// Units and their length in milliseconds, shortest first.
const UNITS: [(&str, u64); 5] = [
    ("ms", 1),
    ("s", 1_000),
    ("m", 60_000),
    ("h", 3_600_000),
    ("d", 86_400_000),
];

impl FromStr for HumanDuration {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::invalid(format!(
                "{} is not a duration: use a number and a unit, as in \"500ms\", \"2s\" or \"30d\"",
                quoted(text)
            ))
        };
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| bad())?;
        let (_, factor) = UNITS
            .into_iter()
            .find(|(name, _)| *name == unit)
            .ok_or_else(bad)?;
        number
            .checked_mul(factor)
            .map(|ms| HumanDuration(Duration::from_millis(ms)))
            .ok_or_else(bad)
    }
}

impl std::fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ms = u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX);
        let fits = UNITS
            .into_iter()
            .rev()
            .find(|(_, factor)| ms >= *factor && ms % factor == 0);
        let (unit, factor) = fits.unwrap_or(("ms", 1));
        write!(f, "{}{unit}", ms / factor)
    }
}

impl Serialize for HumanDuration {
    fn serialize<S: serde::Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for HumanDuration {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        text.parse()
            .map_err(|e: Error| serde::de::Error::custom(e.message))
    }
}

impl schemars::JsonSchema for HumanDuration {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Duration".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "pattern": "^[0-9]+(ms|s|m|h|d)$", "examples": ["500ms", "30d"] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parses_numbers_with_a_unit_and_nothing_else() {
        for (text, ms) in [
            ("500ms", 500),
            ("2s", 2_000),
            ("5m", 300_000),
            ("1h", 3_600_000),
            ("30d", 2_592_000_000),
        ] {
            assert_eq!(
                text.parse::<HumanDuration>(),
                Ok(HumanDuration(Duration::from_millis(ms)))
            );
        }
        for bad in [
            "",
            "5",
            "s",
            "-1s",
            "1.5s",
            "1 s",
            "1w",
            "99999999999999999999s",
            "18446744073709551615d",
        ] {
            assert!(bad.parse::<HumanDuration>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn displayed_durations_parse_to_the_same_value(ms in 0u64..10_000_000_000) {
            let span = HumanDuration(Duration::from_millis(ms));
            prop_assert_eq!(span.to_string().parse::<HumanDuration>(), Ok(span));
        }

        #[test]
        fn parsing_never_panics(text in ".{0,30}") {
            let _ = text.parse::<HumanDuration>();
        }
    }
}
