//! Every error says what failed, where, and what to do.

use std::fs;
use std::process::Command;

use cuda_builder::CudaBuilder;
use devcomm_locate::{NCCL_VERSION, NcclVersion};
use libtest_mimic::Trial;

use crate::support::Needs::{Nccl, Ptxas, RustSource};
use crate::support::{
    CHECK_ALL, Package, TestResult, ensure, hide_nccl, run, script, stderr, stdout, test,
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("an_unresolved_symbol_is_named_with_its_user", &[RustSource], unresolved),
        test("a_misspelt_nccl_function_is_named", &[RustSource, Nccl], misspelt),
        test(
            "a_declaration_with_other_types_than_nccls_is_refused",
            &[RustSource, Nccl],
            other_types,
        ),
        test("a_rust_error_is_printed_by_rustc", &[RustSource], rust_error),
        test("a_use_of_std_is_explained", &[RustSource], uses_std),
        test("a_dependency_that_needs_std_is_named_first", &[RustSource], dependency_with_std),
        test("a_type_that_gpus_lack_is_named_with_its_line", &[RustSource], unsupported_type),
        test("an_abort_of_llvm_is_an_error", &[RustSource], llvm_abort),
        test(
            "too_much_shared_memory_is_explained_with_its_line",
            &[RustSource, Ptxas],
            too_much_shared,
        ),
        test("wrong_assembly_is_named_with_its_line", &[RustSource, Ptxas], wrong_assembly),
        test("checks_that_can_fail_in_a_loop_are_named", &[RustSource], checks_in_loops),
        test("an_indirect_call_that_stays_is_an_error", &[RustSource], indirect),
        test("a_shared_static_with_a_value_is_an_error", &[RustSource], shared_value),
        test("a_parameter_of_no_size_is_an_error", &[RustSource], no_size),
        test("two_architectures_in_a_file_are_an_error", &[RustSource], two_architectures),
        test("bitcode_with_another_indirect_call_is_refused", &[RustSource], other_call),
        test("an_nccl_of_another_version_is_passed_over", &[RustSource, Nccl], other_nccl),
        test("bitcode_with_a_writing_table_entry_is_refused", &[RustSource], writing_entry),
        test("missing_rust_source_names_the_command", &[], no_rust_source),
        test("a_missing_kernel_toolchain_is_named_with_its_command", &[], no_such_toolchain),
        test("a_build_warns_of_stack_with_the_numbers", &[RustSource, Ptxas], stack_is_told),
        test("missing_nccl_is_a_warning_and_an_empty_index", &[RustSource], no_nccl),
        test("missing_nccl_is_an_error_when_kernels_are_required", &[RustSource], required),
        test("cargo_without_a_network_is_a_warning", &[RustSource], no_network),
        test("a_dependency_that_needs_a_newer_rust_is_named", &[RustSource], newer_rust),
        test("a_skipped_build_writes_an_empty_index", &[], skipped),
        test("an_unknown_package_is_named_with_those_that_exist", &[], no_package),
    ]
}

/// Returns a kernel with this body, which may use `p: *mut u32`.
fn kernel(name: &str, before: &str, body: &str) -> Package {
    let source = format!(
        "{before}\n#[unsafe(no_mangle)]\npub unsafe extern \"ptx-kernel\" fn {name}(p: *mut u32) \
         {{ unsafe {{ {body} }} }}\n"
    );
    Package::new(name, &source)
}

/// Checks that the build fails with an error that contains all these texts.
fn fails(package: &Package, texts: &[&str]) -> TestResult {
    contains_all(&expect_error(package.builder())?, texts)
}

fn expect_error(builder: CudaBuilder) -> Result<String, libtest_mimic::Failed> {
    match builder.build() {
        Ok(_) => Err("the build did not fail".into()),
        Err(error) => Ok(error.to_string()),
    }
}

fn contains_all(message: &str, texts: &[&str]) -> TestResult {
    for text in texts {
        ensure(message.contains(text), format!("no `{text}` in: {message}"))?;
    }
    Ok(())
}

fn unresolved() -> TestResult {
    let before = "unsafe extern \"C\" { fn nowhere(x: u32) -> u32; }";
    let package = kernel("unresolved", before, "*p = nowhere(*p)");
    let line = "`unresolved` at src/lib.rs:7:";
    fails(&package, &["unresolved device symbol", "`nowhere`", line, "unresolved.rs", "in Rust"])?;
    let before = "unsafe extern \"C\" { fn __nv_sinf(x: f32) -> f32; }";
    let package = kernel("of_libdevice", before, "*p = __nv_sinf(*p as f32) as u32");
    fails(&package, &["`__nv_sinf`", "`of_libdevice` at src/lib.rs:7:", "cuda_std::math"])
}

fn misspelt() -> TestResult {
    let before = "unsafe extern \"C\" { fn ncclGetLsaPinter(x: u32) -> u32; }";
    let package = kernel("misspelt", before, "*p = ncclGetLsaPinter(*p)");
    let texts = ["unresolved device symbol", "`ncclGetLsaPinter`", "`misspelt`", "raw` lists all"];
    fails(&package, &texts)
}

fn other_types() -> TestResult {
    let before = "unsafe extern \"C\" { fn ncclCoopSize(coop: *const u8) -> u64; }";
    let package = kernel("other_types", before, "*p = ncclCoopSize(p.cast()) as u32");
    fails(&package, &["`ncclCoopSize` is declared as `i64 (ptr)`, but NCCL's is `i32 (ptr)`"])
}

fn rust_error() -> TestResult {
    let package = kernel("rust_error", "", "*p = \"text\"");
    let output = package.as_build_script(|_| {});
    ensure(!output.status.success(), "the build did not fail")?;
    let texts = [
        "error[E0308]: mismatched types",
        "src/lib.rs:",
        "expected `u32`",
        "Error: the kernel package `rust-error` does not compile",
    ];
    contains_all(&stderr(&output), &texts)
}

fn unsupported_type() -> TestResult {
    let package = kernel("wide_float", "", "*p = (*p.cast::<u128>() as f32) as u32");
    fails(&package, &["`wide_float` at src/lib.rs:7:", "a 128-bit integer and a float"])?;
    let package = kernel("quad", "", "*p.cast::<f128>() /= 3.0");
    with_feature(&package, "f128");
    fails(&package, &["`quad` at src/lib.rs:", "f128", "f32 and f64"])
}

/// Enables an unstable feature in a package.
fn with_feature(package: &Package, feature: &str) {
    let line = format!("#![no_std]\n#![feature({feature})]");
    package.write("src/lib.rs", &package.source().replacen("#![no_std]", &line, 1));
}

/// LLVM has no code for the power of f64, and no check of the builder finds this earlier.
fn llvm_abort() -> TestResult {
    let before = "unsafe extern \"C\" { #[link_name = \"llvm.pow.f64\"]\nsafe fn pow(x: f64, y: \
                  f64) -> f64; }";
    let package = kernel("llvm_abort", before, "*p = pow(f64::from(*p), 2.5) as u32");
    with_feature(&package, "link_llvm_intrinsics");
    fails(&package, &["llvm_abort.rs", "kernels: llvm_abort", "LLVM aborted"])
}

fn indirect() -> TestResult {
    let package = kernel("indirect", "", "let f: fn(u32) -> u32 = *p.cast(); *p = f(*p)");
    fails(&package, &["indirect.rs", ".callprototype", "/src/lib.rs:7:", "generic"])
}

/// The kernel has 64 KiB of static shared memory.
fn too_much_shared() -> TestResult {
    let before = "#[unsafe(link_section = \".shared\")]\nstatic mut TILE: \
                  core::mem::MaybeUninit<[u32; 16384]> = core::mem::MaybeUninit::uninit();";
    let body = "let t = (&raw mut TILE).cast::<u32>(); t.add(*p as usize).write_volatile(1); *p = \
                t.add(3).read_volatile()";
    let package = kernel("too_much_shared", before, body);
    let texts = [
        "`too_much_shared` has 65536 bytes of static shared memory",
        "at most 49152",
        "src/lib.rs:8:",
        "dynamic_shared_mem",
    ];
    fails(&package, &texts)?;
    let kept = package.folder.join("out/too_much_shared.ptx");
    ensure(kept.is_file(), "the PTX that the message names is gone")
}

fn wrong_assembly() -> TestResult {
    let package = kernel("wrong_assembly", "", "core::arch::asm!(\"fly.high;\"); *p = 1");
    fails(&package, &["wrong_assembly.rs: ", "/src/lib.rs:7:", "fly"])
}

fn checks_in_loops() -> TestResult {
    let body = "let table = core::slice::from_raw_parts(p, 40);\nfor _ in 0..*p {\n*p ^= \
                table[*p as usize % 64];\n}\nassert!(*p > 3)";
    let artifacts = kernel("checks_in_loops", "", body).builder().build()?;
    let found = artifacts.checks_in_loops()?;
    let [(place, kernels)] = &Vec::from_iter(&found)[..] else {
        return Err(format!("{found:?}").into());
    };
    ensure(place.contains("/src/lib.rs:9:") && **kernels == ["checks_in_loops"], place)
}

fn uses_std() -> TestResult {
    let texts = [
        ("let v = vec![1]; *p = v[0]", "no heap on GPUs"),
        ("println!(\"{}\", *p)", "cuda_std::println!"),
        ("*p = (*p as f32).sin() as u32", "cuda_std::math"),
        ("let m: std::collections::BTreeMap<u32, u32>; *p = 1", "`cuda_std` threads"),
    ];
    for (body, advice) in texts {
        let output = kernel("uses_std", "", body).as_build_script(|_| {});
        ensure(!output.status.success(), "the build did not fail")?;
        contains_all(&stderr(&output), &["src/lib.rs:7:", "\n  note: ", advice])?;
    }
    let package = kernel("uses_std", "", "*p = 1");
    package.write("src/lib.rs", &package.source().replacen("#![no_std]", "", 1));
    let output = package.as_build_script(|_| {});
    contains_all(&stderr(&output), &["note: the kernel package begins with `#![no_std]`"])
}

/// A dependency has an error for each use of `std`, of which only the advice is printed.
fn dependency_with_std() -> TestResult {
    let package = kernel("needs_std", "pub use dependency::f;", "*p = 1");
    let manifest = "[package]\nname = \"dependency\"\nversion = \"2.7.1\"\nedition = \"2024\"\n";
    package.write("dependency/Cargo.toml", manifest);
    package.write("dependency/src/lib.rs", "pub fn f() { println!(\"{}\", String::new()) }\n");
    package.add_to_manifest("[dependencies]\ndependency = { path = \"dependency\" }\n");
    let message = "`dependency`, which the kernel package `needs-std` depends on, needs `std`";
    let fix = "`dependency = { version = \"2.7.1\", default-features = false }`";
    let required = package.as_build_script(|command| {
        command.env("DEVCOMM_REQUIRE_KERNELS", "1");
    });
    ensure(required.status.code() == Some(1), stderr(&required))?;
    contains_all(&stderr(&required), &[message, fix])?;
    ensure(!stderr(&required).contains("error["), stderr(&required))?;
    // Simulated runs need no kernels for GPUs.
    let output = package.as_build_script(|_| {});
    ensure(output.status.success(), stderr(&output))?;
    contains_all(&stdout(&output), &["cargo::warning=kernels were not built: ", message])?;
    contains_all(&package.index(), &["Some(\"kernels were not built", "default-features = false"])
}

fn shared_value() -> TestResult {
    let before = "#[unsafe(link_section = \".shared\")]\nstatic mut COUNT: u32 = 7;";
    let package = kernel("shared_value", before, "COUNT += 1; *p = COUNT");
    fails(&package, &["COUNT", "initial value", "MaybeUninit"])
}

/// Returns kernels `first` and `second` of one file, with this metadata each.
fn declared(name: &str, metadata: [&str; 2]) -> Package {
    let mut source = String::new();
    for (kernel, rest) in ["first", "second"].into_iter().zip(metadata) {
        let json = format!(r#"{{"name":"{kernel}","file":"{name}",{rest}}}"#);
        source += &format!(
            "#[unsafe(no_mangle)]\npub unsafe extern \"ptx-kernel\" fn {kernel}(p: *mut u32) {{ \
             unsafe {{ *p = 1 }} }}\nconst _: () = {{ #[used] #[unsafe(link_section = \
             \".devcomm.kernel\")]\nstatic META: [u8; {}] = *br#\"{json}\"#; }};\n",
            json.len()
        );
    }
    Package::new(name, &source)
}

const POINTER: &str = r#""params":[{"name":"p","type":"*mut u32"}]"#;

fn no_size() -> TestResult {
    let two = r#""params":[{"name":"unit","type":"()"},{"name":"p","type":"*mut u32"}]"#;
    let package = declared("no_size", [POINTER, two]);
    fails(&package, &["`second` declares 2 parameters and its PTX has 1", "zero-sized"])
}

fn two_architectures() -> TestResult {
    let with = |arch: &str| format!("{POINTER},\"arch\":\"{arch}\"");
    let package = declared("two_architectures", [&with("sm_90a"), &with("sm_100a")]);
    fails(&package, &["first (sm_90a)", "second (sm_100a)", "another file"])
}

/// Returns the lines of `nccl.h` that define a version.
fn header(NcclVersion { major, minor, patch }: NcclVersion) -> String {
    format!("#define NCCL_MAJOR {major}\n#define NCCL_MINOR {minor}\n#define NCCL_PATCH {patch}\n")
}

/// Returns an NCCL tree whose bitcode is compiled from this Rust source.
fn fake_nccl(package: &Package, source: &str) -> std::path::PathBuf {
    let root = package.folder.join("nccl");
    for folder in ["lib", "include"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    fs::write(root.join("include/nccl.h"), header(NCCL_VERSION)).unwrap();
    let file = root.join("fake.rs");
    fs::write(&file, source).unwrap();
    let bitcode = root.join("lib/libnccl_device.bc");
    let arguments =
        ["--crate-type=rlib", "--edition=2024", "-O", "-Ccodegen-units=1", "-Cpanic=abort"];
    let mut rustc = Command::new("rustc");
    // rustc writes files of the crate's name to the current folder.
    let rustc = rustc
        .current_dir(&root)
        .args(arguments)
        .arg(format!("--emit=llvm-bc={}", bitcode.display()));
    let output = rustc.arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    root
}

/// Checks the error of a kernel that calls `ncclUse`, with that function in a fake NCCL.
fn with_fake_nccl(name: &str, source: &str, texts: &[&str]) -> TestResult {
    let before = "unsafe extern \"C\" { fn ncclUse(coop: *mut u32) -> i32; }";
    let package = kernel(name, before, "*p = ncclUse(p) as u32");
    let root = fake_nccl(&package, source);
    contains_all(&expect_error(package.builder().nccl_home(root))?, texts)
}

/// Another version, found first, is passed over, and named if there is no other.
fn other_nccl() -> TestResult {
    let before = "unsafe extern \"C\" { fn ncclUse(coop: *mut u32) -> i32; }";
    let package = kernel("other_nccl", before, "*p = ncclUse(p) as u32");
    let root = fake_nccl(&package, "#![no_std]");
    let other = NcclVersion { patch: NCCL_VERSION.patch + 1, ..NCCL_VERSION };
    fs::write(root.join("include/nccl.h"), header(other)).unwrap();
    let error = expect_error(package.builder().nccl_home(&root))?;
    // The NCCL that is found instead has no such function.
    ensure(!error.contains(&other.to_string()), &error)?;
    contains_all(&error, &["ncclUse", "nccl_device::raw"])
}

const COOP: &str = "
#![no_std]
#[repr(C)] pub struct Coop { storage: [u64; 2], table: *const Table }
#[repr(C)] pub struct Table { rank: unsafe extern \"C\" fn(*mut Coop) -> i32 }
unsafe impl Sync for Table {}
";

fn other_call() -> TestResult {
    let source = format!(
        "{COOP}
        #[unsafe(no_mangle)]
        pub unsafe extern \"C\" fn ncclUse(coop: *mut Coop, f: unsafe extern \"C\" fn(*mut \
         Coop) -> i32) -> i32 {{
            unsafe {{ f(coop) }}
        }}"
    );
    with_fake_nccl("other_call", &source, &["ncclUse has an indirect call", "not one of a coop"])
}

fn writing_entry() -> TestResult {
    let source = format!(
        "{COOP}
        #[unsafe(no_mangle)]
        pub unsafe extern \"C\" fn ncclUse(coop: *mut Coop) -> i32 {{
            unsafe {{ ((*(*coop).table).rank)(coop) }}
        }}
        #[unsafe(no_mangle)]
        unsafe extern \"C\" fn writes(coop: *mut Coop) -> i32 {{
            unsafe {{ (*coop).storage[0] = 1; }}
            0
        }}
        #[unsafe(no_mangle)]
        pub static TABLE: Table = Table {{ rank: writes }};"
    );
    with_fake_nccl(
        "writing_entry",
        &source,
        &["writes is called through a table", "more than read"],
    )
}

fn no_rust_source() -> TestResult {
    let package = kernel("no_rust_source", "", "*p = 1");
    let sysroot = package.folder.join("toolchains/1.99.0-test");
    fs::create_dir_all(&sysroot)?;
    let version = run(Command::new("rustc").arg("-vV"));
    let rustc = package.folder.join("rustc");
    let text = format!(
        "#!/bin/sh\nif [ \"$1\" = --print ]; then echo {}; else cat <<'END'\n{version}END\nfi\n",
        sysroot.display()
    );
    script(&rustc, &text);
    let message = expect_error(package.builder().rustc(&rustc))?;
    contains_all(&message, &["rustup component add rust-src --toolchain 1.99.0-test"])?;

    let output = package.as_build_script(|command| {
        command.env("RUSTC", &rustc).env("DEVCOMM_KERNEL_TOOLCHAIN", "user");
    });
    ensure(output.status.success(), stderr(&output))?;
    contains_all(
        &stdout(&output),
        &["cargo::warning=kernels were not built: rust-src is missing"],
    )?;
    contains_all(&package.index(), &["rustup component add rust-src --toolchain 1.99.0-test"])
}

fn no_such_toolchain() -> TestResult {
    let package = kernel("no_such_toolchain", "", "*p = 1");
    let output = package.as_build_script(|command| {
        command.env("DEVCOMM_KERNEL_TOOLCHAIN", "1.2.3");
    });
    ensure(output.status.success(), stderr(&output))?;
    contains_all(
        &stdout(&output),
        &["cargo::warning=kernels were not built: DEVCOMM_KERNEL_TOOLCHAIN is `1.2.3`"],
    )?;
    contains_all(&package.index(), &["rustup toolchain install 1.2.3"])
}

fn stack_is_told() -> TestResult {
    let body = "let (mut all, mut sum) = ([0; 1000], 0);
        for (i, one) in all.iter_mut().enumerate() { sum = sum * 3 + *p.add(i); *one = sum; }
        *p = all[(*p % 1000) as usize]";
    let package = kernel("stack_is_told", "", body);
    let output = package.as_build_script(|command| {
        command.env(CHECK_ALL, "1");
    });
    ensure(output.status.success(), stderr(&output))?;
    let told = [
        "cargo::warning=",
        "stack_is_told: 4000 bytes of stack, none are allowed",
        "rustc 1.",
        "LLVM ",
    ];
    contains_all(&stdout(&output), &told)?;
    // A kernel without `max_threads` may use the stack, and one whose panics print needs it.
    let output = package.as_build_script(|_| {});
    ensure(!stdout(&output).contains("bytes of stack"), stdout(&output))?;
    let output = package.as_build_script(|command| {
        command.env(CHECK_ALL, "1").env("DEVCOMM_PANIC_MESSAGES", "1");
    });
    ensure(output.status.success(), stderr(&output))?;
    ensure(!stdout(&output).contains("bytes of stack"), stdout(&output))
}

fn needs_nccl(name: &str) -> Package {
    let before = "unsafe extern \"C\" { fn ncclCoopSync(coop: *mut u32); }";
    kernel(name, before, "ncclCoopSync(p)")
}

fn no_nccl() -> TestResult {
    let package = needs_nccl("no_nccl");
    let output = package.as_build_script(hide_nccl);
    ensure(output.status.success(), stderr(&output))?;
    let texts = ["cargo::warning=kernels were not built", "/nonexistent/nccl", "cargo xtask setup"];
    contains_all(&stdout(&output), &texts)?;
    contains_all(
        &package.index(),
        &["(&[\n] as", "Some(\"kernels were not built", "cargo xtask setup"],
    )
}

fn required() -> TestResult {
    let package = needs_nccl("required");
    let output = package.as_build_script(|command| {
        hide_nccl(command);
        command.env("DEVCOMM_REQUIRE_KERNELS", "1");
    });
    ensure(
        output.status.code() == Some(1),
        format!("the build script ended with {}", output.status),
    )?;
    contains_all(&stderr(&output), &["/nonexistent/nccl", "cargo xtask setup"])
}

/// Cargo refuses the dependency before it compiles anything.
fn newer_rust() -> TestResult {
    let package = kernel("newer_rust", "", "*p = 1");
    let manifest = "[package]\nname = \"of-the-future\"\nversion = \"0.3.0\"\nrust-version = \
                    \"1.1000\"\nedition = \"2024\"\n";
    package.write("dependency/Cargo.toml", manifest);
    package.write("dependency/src/lib.rs", "#![no_std]\n");
    package.add_to_manifest("[dependencies]\nof-the-future = { path = \"dependency\" }\n");
    let output = package.as_build_script(|_| {});
    ensure(output.status.success(), stderr(&output))?;
    let text = stdout(&output);
    contains_all(
        &text,
        &["of-the-future@0.3.0 requires rustc 1.1000", "DEVCOMM_KERNEL_TOOLCHAIN"],
    )?;
    ensure(!text.contains("network"), text)
}

/// `core` has dependencies; a cargo with an empty cache needs the network.
fn no_network() -> TestResult {
    let package = kernel("no_network", "", "*p = 1");
    let output = package.as_build_script(|command| {
        command
            .env("CARGO_NET_OFFLINE", "true")
            .env("CARGO_HOME", package.folder.join("home"))
            // This cache has no `core` of an earlier build.
            .env("DEVCOMM_CACHE", package.folder.join("cache"));
    });
    ensure(output.status.success(), stderr(&output))?;
    let texts = ["cargo::warning=kernels were not built: cargo cannot start", "network"];
    contains_all(&stdout(&output), &texts)?;
    contains_all(&package.index(), &["(&[\n] as", "cargo cannot start"])
}

fn skipped() -> TestResult {
    for variable in ["DEVCOMM_BUILD_SKIP", "DOCS_RS"] {
        let package = kernel("skipped", "", "*p = 1");
        let output = package.as_build_script(|command| {
            command.env(variable, "1").env("RUSTC", "/nonexistent/rustc");
        });
        ensure(output.status.success(), stderr(&output))?;
        contains_all(&package.index(), &["(&[\n] as", variable])?;
        contains_all(&stdout(&output), &[&format!("cargo::rerun-if-env-changed={variable}")])?;
    }
    Ok(())
}

fn no_package() -> TestResult {
    let package = kernel("no_package", "", "*p = 1");
    let builder =
        CudaBuilder::new("kernles").manifest_dir(&package.folder).out_dir(&package.folder);
    contains_all(&expect_error(builder)?, &["`kernles`", "no-package"])
}
