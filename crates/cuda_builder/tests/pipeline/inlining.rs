//! Which functions of a kernel are inlined.

use std::fs;

use cuda_builder::Artifacts;
use libtest_mimic::Trial;

use crate::support::Needs::RustSource;
use crate::support::{Package, TestResult, body, ensure, test};

pub fn tests() -> Vec<Trial> {
    vec![
        test("functions_are_inlined_without_an_attribute", &[RustSource], all_inlined),
        test("inline_never_and_cold_functions_stay", &[RustSource], kept),
        test("recursion_is_an_error_that_names_the_cycle", &[RustSource], recursion),
        test("recursion_through_inline_never_is_compiled", &[RustSource], allowed),
    ]
}

/// A kernel that calls `f` twice.
const TWICE: &str = "#[unsafe(no_mangle)]\npub unsafe extern \"ptx-kernel\" fn twice(p: *mut u32) \
                     { unsafe { *p = f(*p) ^ f(*p.add(1)) } }\n";

/// Returns a kernel and a function too long for LLVM to inline it of its own accord.
fn long(attribute: &str) -> String {
    let steps: String = (1..1500)
        .map(|i| format!("x = core::hint::black_box(x ^ {i}).wrapping_mul({});", 2 * i + 1))
        .collect();
    format!("{attribute}\nfn f(mut x: u32) -> u32 {{ {steps} x }}\n{TWICE}")
}

fn build(name: &str, source: &str) -> Result<Artifacts, cuda_builder::Error> {
    Package::new(name, source).builder().build()
}

fn calls(artifacts: &Artifacts) -> Result<usize, libtest_mimic::Failed> {
    Ok(body(artifacts, "twice").matches("call.uni").count())
}

/// Checks a function of the kernel package, and one of a dependency.
fn all_inlined() -> TestResult {
    ensure(calls(&build("all_inlined", &long(""))?)? == 0, "a function is called")?;
    let package = Package::new("of_dependency", &format!("use dependency::f;\n{TWICE}"));
    let manifest = "[package]\nname = \"dependency\"\nversion = \"1.0.0\"\nedition = \"2024\"\n";
    package.write("dependency/Cargo.toml", manifest);
    let source = long("pub").replace("pub\nfn", "pub fn").replace(TWICE, "");
    package.write("dependency/src/lib.rs", &format!("#![no_std]\n{source}"));
    package.add_to_manifest("[dependencies]\ndependency = { path = \"dependency\" }\n");
    ensure(calls(&package.builder().build()?)? == 0, "a dependency's function is called")
}

fn kept() -> TestResult {
    for (name, attribute) in [("never_inlined", "#[inline(never)]"), ("cold", "#[cold]")] {
        let artifacts = build(name, &long(attribute))?;
        ensure(calls(&artifacts)? == 2, format!("{attribute} was inlined"))?;
    }
    Ok(())
}

/// Returns a source where `f` calls `g`, and `g` passes a closure that calls `f` to the standard
/// library.
fn recursive(attribute: &str) -> String {
    format!(
        "{attribute}\nfn f(x: u32) -> u32 {{ if x < 2 {{ x }} else {{ g(x / 2) + 1 }} }}\nfn g(x: \
         u32) -> u32 {{ x.checked_sub(3).map_or(0, |y| f(y) ^ f(x - 1)) }}\n{TWICE}"
    )
}

fn recursion() -> TestResult {
    let Err(error) = build("recursion", &recursive("")) else {
        return Err("a cycle of calls was compiled".into());
    };
    let error = error.to_string();
    let lines =
        ["::f` at src/lib.rs:6:", "::g` at src/lib.rs:7:", "::{closure#0}` at src/lib.rs:7:"];
    for text in lines.into_iter().chain(["recursion.rs", "recursion: `", "#[inline(never)]"]) {
        ensure(error.contains(text), format!("no `{text}` in: {error}"))?;
    }
    let itself = "fn f(x: u32) -> u32 { if x < 2 { x } else { f(x / 2) ^ f(x - 1) } }";
    let Err(error) = build("itself", &format!("{itself}\n{TWICE}")) else {
        return Err("a function that calls itself was compiled".into());
    };
    ensure(error.to_string().contains("`itself::f` at src/lib.rs:5:"), error.to_string())?;
    ensure(error.to_string().contains("calls `itself::f`;"), error.to_string())
}

fn allowed() -> TestResult {
    let artifacts = build("allowed", &recursive("#[inline(never)]"))?;
    let text = fs::read_to_string(&artifacts.modules[0].ptx)?;
    ensure(text.matches(".func").count() == 2, format!("not one function that is declared: {text}"))
}
