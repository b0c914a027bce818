//! Properties of the linked kernels.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use cuda_builder::{Artifacts, NvvmArch, Sidecar};
use libtest_mimic::{Failed, Trial};
use miniz_oxide::inflate::decompress_to_vec_zlib;

use crate::support::Needs::{Nccl, Ptxas, RustSource};
use crate::support::{Package, TestResult, body, ensure, script, stderr, test};

pub fn tests() -> Vec<Trial> {
    vec![
        test("nccl_functions_are_inlined", &[RustSource, Nccl], inlined),
        test("an_lsa_kernel_has_no_stack_and_no_spill", &[RustSource, Nccl, Ptxas], no_stack),
        test("statics_and_the_dynamic_array_are_in_shared_memory", &[RustSource, Nccl], shared),
        test("kernels_assemble_for_hopper_and_blackwell", &[RustSource, Nccl, Ptxas], assemble),
        test("the_sidecar_tells_what_the_source_declares", &[RustSource, Nccl], sidecar),
        test(
            "a_kernel_with_barriers_of_a_handle_alone_needs_none_of_the_communicator",
            &[RustSource, Nccl],
            barriers_by_handle,
        ),
        test("a_ptxas_that_is_too_old_for_the_gpu_is_passed_over", &[RustSource, Ptxas], old_ptxas),
        test("checks_of_a_debug_build_stay_in_its_kernels", &[RustSource], debug),
        test(
            "a_program_includes_the_ptx_and_the_cubins_that_were_built",
            &[RustSource, Nccl],
            index,
        ),
        test(
            "kernels_have_source_lines_and_are_optimised_all_the_same",
            &[RustSource, Nccl],
            lines,
        ),
        test(
            "equal_sources_make_equal_files_in_every_folder_without_line_tables",
            &[RustSource, Nccl],
            equal_files,
        ),
        test("ir_is_dumped_before_and_after_optimisation", &[RustSource], dump),
    ]
}

/// Returns the fixture, built once for all tests that only read it.
fn linked() -> Result<&'static Artifacts, Failed> {
    static LINKED: LazyLock<Result<Artifacts, String>> = LazyLock::new(|| {
        Package::fixture("linked").builder().build().map_err(|error| error.to_string())
    });
    LINKED.as_ref().map_err(Failed::from)
}

fn inlined() -> TestResult {
    let artifacts = linked()?;
    for kernel in artifacts.report()? {
        ensure(kernel.calls == 0, format!("{} has {} calls", kernel.name, kernel.calls))?;
        ensure(kernel.call_prototypes == 0, format!("{} has a .callprototype", kernel.file))?;
    }
    let body = body(artifacts, "lsa_allreduce");
    let local = ["ld.local", "st.local", ".local .align"].iter().any(|text| body.contains(text));
    ensure(!local, "the all-reduce kernel uses local memory")
}

fn no_stack() -> TestResult {
    let artifacts = linked()?;
    let report = artifacts.report()?;
    let kernel = report.iter().find(|kernel| kernel.name == "lsa_allreduce").unwrap();
    let used = kernel.resources.ok_or("the kernel has no resources")?;
    ensure((used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), format!("{used:?}"))?;
    ensure(used.registers > 0 && kernel.max_threads >= Some(512), format!("{kernel:?}"))?;
    let cubin = artifacts.modules.iter().all(|m| m.cubin.as_ref().is_some_and(|c| c.is_file()));
    ensure(cubin, "a module has no cubin")
}

fn shared() -> TestResult {
    let artifacts = linked()?;
    let module = artifacts.modules.iter().find(|module| module.file == "shared").unwrap();
    let text = fs::read_to_string(&module.ptx)?;
    let sized =
        text.lines().any(|line| line.trim().starts_with(".shared") && line.contains("[1024]"));
    ensure(sized, "no static of 1,024 bytes in shared memory")?;
    let dynamic = ".extern .shared .align 16 .b8 __cuda_std_dynamic_shared[]";
    ensure(text.contains(dynamic), "no dynamic array in shared memory")?;
    for kernel in ["reverse_static", "reverse_dynamic"] {
        let body = body(artifacts, kernel);
        let found = body.contains("st.shared") && body.contains("ld.shared");
        ensure(found, format!("{kernel} does not access shared memory"))?;
    }
    ensure(module.info.arch == "sm_90a", "the architecture that the kernels require was not used")?;
    let bounds = text.matches(".maxntid 256").count();
    let text = format!("`.maxntid 256` appears {bounds} times; one of the two kernels declares it");
    ensure(bounds == 1, text)
}

fn assemble() -> TestResult {
    for arch in [NvvmArch::Compute90, NvvmArch::Compute100] {
        let artifacts = Package::fixture(&format!("linked_{arch}")).builder().arch(arch).build()?;
        let module = artifacts.modules.iter().find(|module| module.file == "lsa").unwrap();
        ensure(module.info.arch == arch.name(), format!("built for {}", module.info.arch))?;
        ensure(module.cubin.is_some(), format!("no cubin for {arch}"))?;
    }
    Ok(())
}

fn sidecar() -> TestResult {
    let artifacts = linked()?;
    let module = |file| artifacts.modules.iter().find(|m| m.file == file).ok_or("no module");
    let lsa = module("lsa")?;
    let text: serde_json::Value = serde_json::from_slice(&fs::read(&lsa.sidecar)?)?;
    ensure(text["ptx_isa"] == "8.6", format!("PTX {}", text["ptx_isa"]))?;
    ensure(text["nccl"]["bitcode_sha256"].as_str().is_some_and(|s| s.len() == 64), "no hash")?;
    let comm = serde_json::json!({"name": "comm", "type": "DevComm", "size": 248, "align": 8});
    ensure(text["kernels"][0]["params"][0] == comm, format!("{text}"))?;
    // A kernel without #[kernel] is in the package's module, with PTX's parameters.
    let plain = module("fixture_linked")?;
    ensure(plain.info.nccl.is_none(), "the sidecar of a kernel without NCCL names NCCL")?;
    let params = &plain.info.kernels[0].params;
    ensure(params.len() == 3 && params[2].ty == "u64", format!("{params:?}"))
}

fn barriers_by_handle() -> TestResult {
    let module = linked()?.modules.iter().find(|module| module.file == "lsa").ok_or("no module")?;
    let kernels: Vec<(&str, bool)> =
        module.info.kernels.iter().map(|kernel| (&*kernel.name, kernel.lsa_barriers)).collect();
    let wanted = [("lsa_allreduce", true), ("of_a_handle", false), ("of_both", true)];
    ensure(kernels == wanted, format!("{kernels:?}"))
}

fn old_ptxas() -> TestResult {
    let source = "#[unsafe(no_mangle)] pub extern \"ptx-kernel\" fn old_ptxas() {}";
    let package = Package::new("old_ptxas", source);
    let ptxas = package.folder.join("ptxas");
    let release = "echo 'Cuda compilation tools, release 12.8, V12.8.93'";
    script(&ptxas, &format!("#!/bin/sh\n{release}\ncase \"$*\" in *sm_103*) exit 1;; esac\n"));
    let output = package.as_build_script(|command| {
        command.env("DEVCOMM_PTXAS", &ptxas).env("DEVCOMM_CUDA_ARCH", "sm_103");
    });
    ensure(output.status.success(), stderr(&output))?;
    let cubin = package.folder.join("out-dir/kernels/old_ptxas.cubin");
    ensure(cubin.is_file(), "no cubin by another ptxas")
}

fn debug() -> TestResult {
    let source = "#[unsafe(no_mangle)]\npub unsafe extern \"ptx-kernel\" fn add(p: *mut u32, q: \
                  u32) { unsafe { *p += q } }\n";
    let package = Package::new("debug_checks", source);
    let has_check = |artifacts: &Artifacts| {
        fs::read_to_string(&artifacts.modules[0].ptx).map(|ptx| ptx.contains("setp"))
    };
    ensure(!has_check(&package.builder().build()?)?, "a release kernel checks for overflow")?;
    ensure(has_check(&package.builder().debug(true).build()?)?, "no check for overflow")
}

fn index() -> TestResult {
    let package = Package::fixture("index");
    let output = package.as_build_script(|_| {});
    ensure(output.status.success(), stderr(&output))?;
    let (built, included) =
        (package.folder.join("out-dir/kernels"), package.folder.join("included"));
    fs::create_dir_all(&included)?;
    let program = format!(
        "const KERNELS: (&[(&str, &[u8], &str, Option<&[u8]>)], Option<&str>) = include!({:?});
         fn main() {{
             assert!(KERNELS.1.is_none());
             for (name, ptx, json, cubin) in KERNELS.0 {{
                 println!(\"{{name}}\");
                 let write = |kind: &str, bytes: &[u8]| {{
                     let path = std::path::Path::new({included:?}).join(name);
                     std::fs::write(path.with_extension(kind), bytes).unwrap();
                 }};
                 write(\"ptx\", ptx);
                 write(\"json\", json.as_bytes());
                 write(\"cubin\", cubin.unwrap_or_default());
             }}
         }}",
        built.join("kernels.rs")
    );
    let source = package.folder.join("program.rs");
    fs::write(&source, program)?;
    let binary = package.folder.join("program.out");
    let compiled =
        std::process::Command::new("rustc").arg(&source).arg("-o").arg(&binary).output()?;
    ensure(compiled.status.success(), stderr(&compiled))?;
    let ran = std::process::Command::new(&binary).output()?;
    let stdout = crate::support::stdout(&ran);
    let names: Vec<&str> = stdout.lines().collect();
    ensure(names == ["barrier", "fixture_index", "lsa", "shared"], format!("{names:?}"))?;
    for name in names {
        let file = |folder: &Path, kind: &str| fs::read(folder.join(name).with_extension(kind));
        ensure(
            file(&built, "json")? == file(&included, "json")?,
            "the included sidecar differs from the built one",
        )?;
        let info: Sidecar = serde_json::from_slice(&file(&built, "json")?)?;
        let kinds = if info.cubin_sha256.is_some() { &["ptx", "cubin"][..] } else { &["ptx"] };
        for kind in kinds {
            let unpacked = decompress_to_vec_zlib(&file(&included, kind)?);
            let whole = unpacked.is_ok_and(|bytes| file(&built, kind).is_ok_and(|b| b == bytes));
            ensure(whole, format!("{name}.{kind} is not what was built"))?;
        }
        let assembled = built.join(name).with_extension("cubin").is_file();
        ensure(assembled == info.cubin_sha256.is_some(), format!("{:?}", info.cubin_sha256))?;
    }
    Ok(())
}

fn lines() -> TestResult {
    let lsa = linked()?.modules.iter().find(|module| module.file == "lsa").unwrap();
    let text = fs::read_to_string(&lsa.ptx)?;
    ensure(text.contains(".loc") && text.contains("src/lsa.rs\""), "no lines of lsa.rs")?;
    // ptxas optimises a module of `.target sm_90, debug` less: twice the registers.
    let target = text.lines().find(|line| line.starts_with(".target"));
    ensure(target == Some(".target sm_90"), format!("{target:?}"))
}

/// Builds two copies of a package, each in a folder and with a cache of its own.
fn equal_files() -> TestResult {
    let build = |place: &str| -> Result<BTreeMap<OsString, Vec<u8>>, Failed> {
        let fixture = Package::fixture(place);
        let manifest = fs::read_to_string(fixture.folder.join("Cargo.toml"))?;
        let package = Package { name: "fixture-copy".to_owned(), folder: fixture.folder };
        package.write("Cargo.toml", &manifest.replace(&fixture.name, &package.name));
        let target = package.folder.join("target-of-kernels");
        let _ = fs::remove_dir_all(&target);
        let artifacts = package.builder().target_dir(target).line_tables(false).build()?;
        let entries = fs::read_dir(&artifacts.folder)?.map(|entry| {
            let path = entry?.path();
            Ok((path.file_name().unwrap_or_default().to_owned(), fs::read(path)?))
        });
        Ok(entries.collect::<std::io::Result<_>>()?)
    };
    let (here, elsewhere) = (build("equal_here")?, build("equal_elsewhere")?);
    ensure(here.keys().eq(elsewhere.keys()), format!("{:?}, {:?}", here.keys(), elsewhere.keys()))?;
    for (name, bytes) in &here {
        ensure(elsewhere[name] == *bytes, format!("{name:?} differs"))?;
        let names_the_folder = String::from_utf8_lossy(bytes).contains("equal_here");
        ensure(!names_the_folder, format!("{name:?} has the folder of the sources"))?;
    }
    let ptx = here.get(OsStr::new("lsa.ptx")).map(|ptx| String::from_utf8_lossy(ptx));
    let ptx = ptx.ok_or("there is no lsa.ptx")?;
    let table = [".file", ".loc\t", ".debug_", "$L__tmp"];
    ensure(!table.iter().any(|part| ptx.contains(part)), "lsa.ptx has a line table")?;
    let module = linked()?.modules.iter().find(|module| module.file == "lsa").unwrap();
    let with_lines = fs::read_to_string(&module.ptx)?;
    // Debug sections are at the end. LLVM 23 has the names of functions in one.
    let code = with_lines.split("\t.section\t.debug_").next().unwrap_or_default();
    let code = code.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
    let is_code = |line: &&str| !line.is_empty() && !table.iter().any(|part| line.contains(part));
    ensure(
        ptx.lines().eq(code.filter(is_code)),
        "the instructions are not those of a build with line tables",
    )
}

fn dump() -> TestResult {
    let source = "#[unsafe(no_mangle)]\npub unsafe extern \"ptx-kernel\" fn dumped(p: *mut u32) { \
                  unsafe { *p = 1 } }\n";
    let package = Package::new("dump_ir", source);
    let folder = package.folder.join("ir");
    let output = package.as_build_script(|command| {
        command.env("DEVCOMM_DUMP_IR", &folder);
    });
    ensure(output.status.success(), stderr(&output))?;
    for stage in ["before", "after"] {
        let text = fs::read_to_string(folder.join(format!("dump_ir.{stage}.ll")))?;
        ensure(text.contains("@dumped("), format!("the IR {stage} has no kernel"))?;
    }
    Ok(())
}
