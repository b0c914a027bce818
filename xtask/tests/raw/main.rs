//! Tests the list of NCCL's C functions against NCCL and through the compiler.
//!
//! The harness is libtest-mimic: this program is also the builder's worker and must reach
//! `link_worker` first, and a test can report at run time that it was skipped.

mod kernels;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Result;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use xtask::raw::{Files, Nccl, differences, listed, not_listed, parse};

fn main() {
    cuda_builder::link_worker();
    let tests = vec![
        test("the_checked_in_list_is_what_nccl_says", the_list_is_what_nccl_says),
        test(
            "every_c_function_of_the_bitcode_is_accounted_for_once",
            every_function_is_accounted_for,
        ),
        test(
            "a_function_with_another_signature_is_found_in_the_real_list",
            another_signature_is_found,
        ),
        test("every_listed_function_inlines_into_a_kernel", kernels::every_function_inlines),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit();
}

/// Returns a test that needs NCCL's bitcode and headers. Without them it is skipped, or fails if
/// `DEVCOMM_REQUIRE_KERNELS=1`.
fn test(name: &str, body: fn(&Nccl) -> Result<(), Failed>) -> Trial {
    Trial::ignorable_test(name, move || match Nccl::find() {
        Ok(nccl) => body(&nccl).map(|()| Completion::Completed),
        Err(reason) if std::env::var_os("DEVCOMM_REQUIRE_KERNELS").is_some_and(|v| v == "1") => {
            Err(format!("DEVCOMM_REQUIRE_KERNELS is set, and {reason}").into())
        }
        Err(reason) => Ok(Completion::ignored_with(format!("SKIPPED: {reason}"))),
    })
}

/// Returns the root of the checkout.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), Failed> {
    if condition { Ok(()) } else { Err(message().into()) }
}

fn the_list_is_what_nccl_says(nccl: &Nccl) -> Result<(), Failed> {
    let checked_in = Files::checked_in(&root())?;
    let found = differences(&parse(&checked_in.list)?, &listed(nccl.c_functions()?));
    ensure(found.is_empty(), || found.join("\n"))?;
    let generated = Files::generate(nccl)?;
    ensure(checked_in == generated, || "run `cargo xtask raw`".to_owned())
}

fn every_function_is_accounted_for(nccl: &Nccl) -> Result<(), Failed> {
    let files = Files::checked_in(&root())?;
    let list: Vec<String> = parse(&files.list)?.into_iter().map(|function| function.name).collect();
    // `native.md` has a row for each function that the list leaves out.
    let rows = files.native.lines().filter_map(|line| line.strip_prefix("| `nccl"));
    let native: Vec<String> =
        rows.filter_map(|row| Some(format!("nccl{}", row.split_once('`')?.0))).collect();
    let functions = nccl.c_functions()?;
    ensure(native.len() == not_listed(functions.clone()).len(), || format!("{native:?}"))?;
    let ours: BTreeSet<&String> = list.iter().chain(&native).collect();
    ensure(ours.len() == list.len() + native.len(), || "a function is listed twice".to_owned())?;
    let nccls: BTreeSet<&String> = functions.iter().map(|function| &function.name).collect();
    ensure(ours == nccls, || {
        let difference: Vec<_> = ours.symmetric_difference(&nccls).collect();
        format!("only in the files or only in the bitcode: {difference:?}")
    })?;
    let counts = (nccl.version.to_string(), list.len(), native.len());
    ensure(counts.0 != "2.32.3" || (counts.1, counts.2) == (164, 13), || format!("{counts:?}"))
}

/// Changes the real list in ways that the comparison must detect.
fn another_signature_is_found(nccl: &Nccl) -> Result<(), Failed> {
    let list = parse(&Files::checked_in(&root())?.list)?;
    let bitcode = listed(nccl.c_functions()?);
    let other = |ty: &str| if ["i64", "u64", "usize"].contains(&ty) { "i32" } else { "u64" };
    for (index, function) in list.iter().enumerate() {
        let finds = |changed: Vec<_>, what: &str| {
            let found = differences(&changed, &bitcode);
            ensure(found.iter().any(|text| text.contains(&function.name)), || {
                format!("{} {what}: {found:?}", function.name)
            })
        };
        for param in 0..function.params.len() {
            let mut changed = list.clone();
            let ty = &mut changed[index].params[param].ty;
            *ty = other(ty).to_owned();
            finds(changed, "with a parameter of another type")?;
        }
        let mut changed = list.clone();
        let returns = &mut changed[index].returns;
        *returns = Some(other(returns.as_deref().unwrap_or_default()).to_owned());
        finds(changed, "with a result of another type")?;
        let mut changed = list.clone();
        changed.remove(index);
        finds(changed, "left out")?;
    }
    Ok(())
}
