//! rustc's messages of a kernel build, and advice on the mistakes that they do not explain.

use std::path::Path;

use cargo_metadata::CompilerMessage;
use cargo_metadata::diagnostic::DiagnosticLevel;

use crate::error::Error;

/// The messages of a build.
#[derive(Debug, Default)]
pub(crate) struct Diagnostics {
    /// The text of all messages, as rustc prints it.
    pub(crate) text: String,
    /// Whether cargo has started to compile.
    pub(crate) begun: bool,
    errors: Vec<CompilerMessage>,
}

impl Diagnostics {
    pub(crate) fn add(&mut self, message: CompilerMessage) {
        self.text += message.message.rendered.as_deref().unwrap_or_default();
        if matches!(message.message.level, DiagnosticLevel::Error | DiagnosticLevel::Ice) {
            self.errors.push(message);
        }
    }

    /// Returns the error of a build of this package, with this root file, that has failed.
    pub(crate) fn error(&self, package: &str, root: &Path) -> Error {
        let is_own = |message: &&CompilerMessage| message.target.src_path.as_std_path() == root;
        let lacks_std = |message: &&CompilerMessage| {
            let code = message.message.code.as_ref().map(|code| code.code.as_str());
            let names = ["`std`", "`alloc`"];
            code == Some("E0463") && names.iter().any(|name| message.message.message.contains(name))
        };
        let package = package.to_owned();
        let elsewhere = self.errors.iter().find(|one| !is_own(one) && lacks_std(one));
        if let Some(message) = elsewhere {
            let (dependency, version) = name_and_version(message);
            return Error::NeedsStd { package, dependency, version };
        }
        let mut advice = Vec::new();
        for message in self.errors.iter().filter(is_own) {
            advice.extend(advice_for(&message.message.message));
        }
        advice.sort_unstable();
        advice.dedup();
        Error::Compile { package, advice }
    }
}

/// Returns the name and the version of a message's package, from `..#half@2.4.1` or
/// `..path/half#2.4.1`.
fn name_and_version(message: &CompilerMessage) -> (String, String) {
    let id = &message.package_id.repr;
    let (before, after) = id.rsplit_once('#').unwrap_or((id, ""));
    let folder = before.rsplit('/').next().unwrap_or(before);
    let (name, version) = after.split_once('@').unwrap_or((folder, after));
    (name.to_owned(), version.to_owned())
}

/// Returns what to do about an error of a kernel package, if rustc does not know GPUs.
fn advice_for(message: &str) -> Option<&'static str> {
    /// Functions of floats that `std` has and `core` has not.
    const FLOAT: [&str; 24] = [
        "sin",
        "cos",
        "tan",
        "sin_cos",
        "asin",
        "acos",
        "atan",
        "atan2",
        "sinh",
        "cosh",
        "tanh",
        "exp",
        "exp2",
        "exp_m1",
        "ln",
        "ln_1p",
        "log",
        "log2",
        "log10",
        "powf",
        "powi",
        "cbrt",
        "hypot",
        "rem_euclid",
    ];
    const GPU_FLOAT: [&str; 7] = ["mul_add", "sqrt", "floor", "ceil", "trunc", "round", "fract"];
    let quoted = |index: usize| message.split('`').nth(index).unwrap_or_default();
    let is_float = message.starts_with("no method named") && ["f32", "f64"].contains(&quoted(3));
    if message.starts_with("can't find crate for `std`") {
        Some(
            "the kernel package begins with `#![no_std]`, or with `#![cfg_attr(target_arch = \
             \"nvptx64\", no_std)]`: GPUs have no `std`",
        )
    } else if message.starts_with("can't find crate for `alloc`") {
        Some(
            "there is no heap on GPUs: take arrays, `cuda_std::shared_array!`, or memory that the \
             host allocates",
        )
    } else if is_float && GPU_FLOAT.contains(&quoted(1)) {
        Some("`use cuda_std::GpuFloat;` brings the methods of floats that `core` has not")
    } else if is_float && FLOAT.contains(&quoted(1)) {
        Some("`cuda_std::math` has functions of floats that `core` has not: `math::sin(x)`")
    } else if message.starts_with("cannot find macro") {
        match quoted(1) {
            "println" | "print" | "eprintln" | "eprint" | "dbg" => {
                Some("kernels print by `cuda_std::println!`")
            }
            "vec" | "format" => Some(
                "there is no heap on GPUs: take arrays, `cuda_std::shared_array!`, or memory that \
                 the host allocates",
            ),
            "thread_local" => Some("a variable of a kernel is each thread's own"),
            _ => None,
        }
    } else if ["std", "Vec", "String", "Box"].contains(&quoted(1))
        && message.starts_with("cannot find")
    {
        Some(
            "GPUs have no `std`: `core` has what needs no operating system and no heap, `cuda_std` \
             threads, shared memory, atomics, mathematics and printing",
        )
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::advice_for;

    #[test]
    fn mistakes_that_rustc_does_not_explain_have_advice() {
        for (message, advice) in [
            ("can't find crate for `std`", "#![no_std]"),
            ("can't find crate for `alloc`", "no heap"),
            ("cannot find macro `vec` in this scope", "no heap"),
            ("cannot find macro `println` in this scope", "cuda_std::println!"),
            ("no method named `sin` found for type `f32` in the current scope", "cuda_std::math"),
            ("no method named `sqrt` found for type `f64` in the current scope", "GpuFloat"),
            ("cannot find module or crate `std` in this scope", "`core` has"),
            ("cannot find type `Vec` in this scope", "`core` has"),
        ] {
            let found = advice_for(message).unwrap_or_default();
            assert!(found.contains(advice), "{message}: {found}");
        }
        for message in ["mismatched types", "no method named `sin` found for struct `Wave`"] {
            assert_eq!(advice_for(message), None);
        }
    }
}
