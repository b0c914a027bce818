//! What the plans of all operations share: their text, and the reason of a choice.

use std::fmt;

/// What `explain` of an operation returns. As text: `lamport:16x128, as the message is short`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explanation<P = crate::CollectivePlan> {
    /// The plan.
    pub plan: P,
    /// Why it was chosen: a clause such as `as the message is short`.
    pub reason: &'static str,
}

impl<P: fmt::Display> fmt::Display for Explanation<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.plan, self.reason)
    }
}

/// The name of the H100 with SXM5 and HBM3, on which plans were measured.
pub(crate) const H100: &str = "NVIDIA H100 80GB HBM3";
/// The name of the H200 with SXM5.
pub(crate) const H200: &str = "NVIDIA H200";

/// The error for a text that names no plan, or nothing else of its type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no {noun}: {forms}")]
pub struct ParseNameError {
    text: String,
    noun: &'static str,
    /// The texts that values of this type have.
    forms: &'static str,
}

/// A field of a plan's text: a number above 0, or two such numbers with an `x` between them.
pub(crate) type Field = (u32, Option<u32>);

/// The grammar of plans: a name, and fields after colons, such as `swapped:16x64:2`.
pub(crate) trait PlanText: Copy + PartialEq + 'static {
    /// What it is, for errors.
    const NOUN: &'static str = "plan";
    /// The forms of the text, for errors.
    const FORMS: &'static str;
    /// The plans without fields.
    const NAMES: &'static [(&'static str, Self)];

    /// Returns the plan of this name with these fields, if there is one.
    fn from_fields(_: &str, _: &[Field]) -> Option<Self> {
        None
    }

    /// Returns the name and the fields of a plan that is not one of [`NAMES`](Self::NAMES).
    fn fields(self) -> (&'static str, Vec<Field>) {
        Default::default()
    }
}

pub(crate) fn parse<P: PlanText>(text: &str) -> Result<P, ParseNameError> {
    let number = |text: &str| text.parse().ok().filter(|number| *number > 0);
    let field = |text: &str| match text.split_once('x') {
        Some((first, second)) => Some((number(first)?, Some(number(second)?))),
        None => Some((number(text)?, None)),
    };
    let with_fields = |(name, fields): (_, &str)| {
        P::from_fields(name, &fields.split(':').map(field).collect::<Option<Vec<_>>>()?)
    };
    let named = P::NAMES.iter().find(|(name, _)| *name == text).map(|(_, plan)| *plan);
    let plan = named.or_else(|| text.split_once(':').and_then(with_fields));
    plan.ok_or_else(|| ParseNameError { text: text.to_owned(), noun: P::NOUN, forms: P::FORMS })
}

pub(crate) fn display<P: PlanText>(plan: P, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let named = P::NAMES.iter().find(|(_, named)| *named == plan);
    let (name, fields) = named.map_or_else(|| plan.fields(), |(name, _)| (*name, Vec::new()));
    f.write_str(name)?;
    fields.iter().try_for_each(|(first, second)| match second {
        Some(second) => write!(f, ":{first}x{second}"),
        None => write!(f, ":{first}"),
    })
}

/// Implements `Display` and `FromStr` for a type that implements [`PlanText`].
macro_rules! plan_text {
    ($plan:ident) => {
        impl ::std::fmt::Display for $plan {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                $crate::plan::display(*self, f)
            }
        }

        impl ::std::str::FromStr for $plan {
            type Err = $crate::ParseNameError;

            fn from_str(text: &str) -> ::std::result::Result<Self, $crate::ParseNameError> {
                $crate::plan::parse(text)
            }
        }
    };
}

pub(crate) use plan_text;

/// Implements [`PlanText`] for an enum, by the names of its variants, which errors list.
macro_rules! names {
    ($type:ident $noun:literal $forms:literal: $($variant:ident $name:literal)*) => {
        impl $crate::plan::PlanText for $type {
            const NOUN: &'static str = $noun;
            const FORMS: &'static str = $forms;
            const NAMES: &'static [(&'static str, Self)] = &[$(($name, Self::$variant)),*];
        }

        $crate::plan::plan_text!($type);
    };
}

pub(crate) use names;
