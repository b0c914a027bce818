//! `cargo xtask twins`: compiles the kernels that exist in Rust and in CUDA C++ from both, for
//! `devcomm-bench twins`.
//!
//! ```text
//! kernels/src/X.rs, bench/kernels/src/X.rs --rustc, LLVM--> PTX --\
//!                                                                   ptxas --> cubin, json
//! bench/cpp/X.cu   --nvcc -ptx, NCCL's headers-------------> PTX --/
//! ```
//!
//! Cubins and sidecars (JSON metadata) are in `target/twins/{rust,cpp}`.
//!
//! The same ptxas with the same flags assembles both, so that only languages and compilers differ.
//! Twins are a Rust and a C++ file with equal names, entries and parameters.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use comfy_table::{CellAlignment, Table, presets};
use cuda_builder::{Artifacts, CudaBuilder, KernelReport, ModuleArtifact, NcclCode, NvvmArch};
use devcomm_cli::setup::{Optional, find_pinned_nccl, setup};
use devcomm_locate::{NCCL_VERSION, NcclTree};

use crate::nvcc::{self, Nvcc};
use crate::project::{Project, root};

/// The folder of the C++ kernels.
const SOURCES: &str = "bench/cpp";

/// The packages with the Rust kernels.
const PACKAGES: [&str; 2] = ["devcomm-kernels", "devcomm-bench-kernels"];

/// Compiles both languages' kernels and prints each kernel's resources.
pub fn twins() -> Result<()> {
    let twins = build()?;
    println!("{}", table(&twins.rust.report()?, &twins.cpp.report()?));
    println!("\nPTX, sidecars and cubins: {}", twins.folder.display());
    Ok(())
}

/// The compiled kernels.
pub struct Twins {
    /// Contains the folders `rust` and `cpp`.
    pub folder: PathBuf,
    rust: Artifacts,
    cpp: Artifacts,
}

/// Compiles both languages' kernels into the target folder.
pub fn build() -> Result<Twins> {
    setup(true, Optional::Nothing)?;
    let nvcc = nvcc::find_or_fetch()?;
    let tree = find_pinned_nccl()?;
    let target = Project::open()?.target_folder();
    let folder = target.join("twins");
    let sources = nvcc::sources(SOURCES)?;
    let rust = compile_rust(&sources, &target.join("ptx"), &folder.join("rust"))?;
    let cpp = compile_cpp(&nvcc, &tree, &sources, &folder.join("cpp"))?;
    ensure_same_entries(&rust, &cpp)?;
    Ok(Twins { folder, rust, cpp })
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Compiles the Rust kernels, and keeps those with a twin.
fn compile_rust(sources: &[PathBuf], builds: &Path, folder: &Path) -> Result<Artifacts> {
    empty(folder)?;
    let mut modules = Vec::new();
    for package in PACKAGES {
        let build = builds.join("twins").join(package);
        let builder = CudaBuilder::new(package).arch(NvvmArch::Compute90).manifest_dir(root());
        for module in builder.out_dir(build).build()?.modules {
            if sources.iter().any(|source| stem(source) == module.file) {
                modules.push(copied(module, folder)?);
            }
        }
    }
    modules.sort_by(|a, b| a.file.cmp(&b.file));
    Ok(artifacts(folder, modules))
}

/// Returns a copy of the module in another folder.
fn copied(module: ModuleArtifact, folder: &Path) -> Result<ModuleArtifact> {
    let copy = |file: &Path| -> Result<PathBuf> {
        let target = folder.join(file.file_name().unwrap_or_default());
        fs::copy(file, &target).with_context(|| format!("cannot write {}", target.display()))?;
        Ok(target)
    };
    let cubin = module.cubin.as_deref().map(copy).transpose()?;
    Ok(ModuleArtifact { ptx: copy(&module.ptx)?, sidecar: copy(&module.sidecar)?, cubin, ..module })
}

/// Compiles the C++ kernels, one thread per processor.
fn compile_cpp(
    nvcc: &Nvcc,
    tree: &NcclTree,
    sources: &[PathBuf],
    folder: &Path,
) -> Result<Artifacts> {
    empty(folder)?;
    let include = tree.include.as_deref().context("the NCCL installation has no headers")?;
    let at_once = thread::available_parallelism().map_or(1, |count| count.get());
    let mut modules = Vec::new();
    for chunk in sources.chunks(at_once) {
        let compiled: Vec<Result<ModuleArtifact>> = thread::scope(|scope| {
            let threads: Vec<_> = chunk
                .iter()
                .map(|source| scope.spawn(|| compile_one(nvcc, include, source, folder)))
                .collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| match thread.join() {
                Ok(module) => module,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            threads.into_iter().map(join).collect()
        });
        modules.extend(compiled.into_iter().collect::<Result<Vec<_>>>()?);
    }
    Ok(artifacts(folder, modules))
}

fn compile_one(
    nvcc: &Nvcc,
    include: &Path,
    source: &Path,
    folder: &Path,
) -> Result<ModuleArtifact> {
    let ptx = folder.join(format!("{}.ptx", stem(source)));
    let mut command = Command::new(&nvcc.path);
    // NCCL's reduce-copy needs lambdas. Line tables, as in the Rust kernels, change no code.
    command
        .args(["-ptx", "-O3", "-std=c++17", "--extended-lambda", "-lineinfo"])
        .args(["-arch", NvvmArch::Compute90.name(), "-I"])
        .args([include, source])
        .arg("-o")
        .arg(&ptx);
    let output =
        command.output().with_context(|| format!("{} does not start", nvcc.path.display()))?;
    if !output.status.success() {
        let messages = String::from_utf8_lossy(&output.stderr);
        bail!("nvcc does not compile {}:\n{}", source.display(), messages.trim());
    }
    let nccl = NcclCode { version: NCCL_VERSION.to_string(), bitcode_sha256: String::new() };
    Ok(ModuleArtifact::from_ptx(&ptx, &nvcc.version, Some(nccl))?)
}

fn artifacts(folder: &Path, modules: Vec<ModuleArtifact>) -> Artifacts {
    let folder = folder.to_owned();
    Artifacts { index: folder.join("kernels.rs"), folder, modules, missing: None }
}

/// Makes an empty folder.
fn empty(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

/// Refuses pairs that are not twins: different entries, or parameters of different sizes.
fn ensure_same_entries(rust: &Artifacts, cpp: &Artifacts) -> Result<()> {
    for module in &rust.modules {
        let twin = cpp.modules.iter().find(|other| other.file == module.file);
        let twin = twin.with_context(|| format!("{}.cu was not compiled", module.file))?;
        let entries = |module: &ModuleArtifact| {
            let mut entries: Vec<String> = module.info.kernels.iter().map(entry).collect();
            entries.sort();
            entries.join(", ")
        };
        let (ours, theirs) = (entries(module), entries(twin));
        ensure!(
            ours == theirs,
            "{0}.rs and {0}.cu are not twins: the entries, with their parameters' sizes in bytes, \
            are\n  {ours}\n  {theirs}",
            module.file
        );
    }
    Ok(())
}

/// Returns a kernel's name and the size of each parameter in bytes.
fn entry(kernel: &cuda_builder::Kernel) -> String {
    let sizes: Vec<String> = kernel.params.iter().map(|param| param.size.to_string()).collect();
    format!("{}({})", kernel.name, sizes.join(" "))
}

fn table(rust: &[KernelReport], cpp: &[KernelReport]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "kernel",
        "",
        "registers",
        "stack",
        "spills",
        "calls",
    ]);
    for twin in cpp {
        let ours = rust.iter().find(|report| report.name == twin.name);
        for (language, report) in [("Rust", ours), ("C++", Some(twin))] {
            let resources = report.and_then(|report| report.resources);
            let known =
                |value: Option<u32>| value.map_or("-".to_owned(), |value| value.to_string());
            table.add_row([
                if language == "Rust" { twin.name.clone() } else { String::new() },
                language.to_owned(),
                known(resources.map(|r| r.registers)),
                known(resources.map(|r| r.stack)),
                known(resources.map(|r| r.spill_stores + r.spill_loads)),
                known(report.map(|report| report.calls as u32)),
            ]);
        }
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_builder::{Kernel, Param, Resources, Sidecar};
    use std::io::Write;

    fn module_of(kernels: &[(&str, &[usize])]) -> Artifacts {
        let param = |&size: &usize| Param { name: "p".into(), ty: "b8".into(), size, align: 8 };
        let kernel = |(name, sizes): &(&str, &[usize])| Kernel {
            name: (*name).to_owned(),
            file: "sum".to_owned(),
            params: sizes.iter().map(param).collect(),
            lsa_barriers: false,
            resources: Some(Resources::default()),
        };
        let info = Sidecar {
            package: None,
            arch: "sm_90".into(),
            ptx_isa: "8.6".into(),
            rustc: String::new(),
            llvm: String::new(),
            nccl: None,
            cubin_sha256: None,
            kernels: kernels.iter().map(kernel).collect(),
        };
        let path = || PathBuf::from("sum");
        let (ptx, sidecar) = (path(), path());
        let file = "sum".to_owned();
        let module = ModuleArtifact { file, ptx, sidecar, cubin: None, info, linked: true };
        artifacts(Path::new("twins"), vec![module])
    }

    #[test]
    fn files_of_one_name_with_other_entries_or_parameters_are_no_twins() {
        let rust = module_of(&[("sum_f32", &[248, 8]), ("sum_f16", &[248, 8])]);
        let other_order = module_of(&[("sum_f16", &[248, 8]), ("sum_f32", &[248, 8])]);
        ensure_same_entries(&rust, &other_order).unwrap();
        for wrong in [
            module_of(&[("sum_f32", &[248, 8])]),
            module_of(&[("sum_f32", &[248, 8]), ("sum_f16", &[248, 4])]),
            module_of(&[("sum_f32", &[248, 8]), ("sum_bf16", &[248, 8])]),
        ] {
            let error = ensure_same_entries(&rust, &wrong).unwrap_err().to_string();
            assert!(error.contains("sum.rs and sum.cu are not twins"), "{error}");
        }
    }

    #[test]
    fn every_cpp_twin_compiles_without_stack_or_spills() {
        let name = "every_cpp_twin_compiles_without_stack_or_spills";
        let (nvcc, tree) = match (nvcc::find(), find_pinned_nccl()) {
            (Ok(nvcc), Ok(tree)) => (nvcc, tree),
            (nvcc, tree) => {
                let nccl = tree.err().map(|_| "NCCL is not set up".to_owned());
                let reason = nvcc.err().map(|error| error.to_string()).or(nccl);
                // This is written to standard output, as the test harness would capture `println!`.
                let reason = reason.unwrap_or_default();
                let _ = writeln!(std::io::stdout(), "SKIPPED {name}: {reason}");
                return;
            }
        };
        let folder = tempfile::tempdir().unwrap();
        let sources = nvcc::sources(SOURCES).unwrap();
        let compiled = compile_cpp(&nvcc, &tree, &sources, folder.path()).unwrap();
        assert_eq!(compiled.modules.len(), sources.len());
        for report in compiled.report().unwrap() {
            let Some(taken) = report.resources else { continue };
            let local = taken.stack + taken.spill_stores + taken.spill_loads;
            assert_eq!((local, report.calls), (0, 0), "{}", report.name);
        }
    }
}
