use super::*;

use std::ffi::OsString;
use std::fs;

use crate::wheel::record;

/// A fake system under a temporary folder.
struct FakeSystem {
    root: tempfile::TempDir,
    vars: Vec<(&'static str, OsString)>,
    ldconfig: String,
}

impl FakeSystem {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let cache = root.path().join("cache").into();
        Self { root, vars: vec![("DEVCOMM_CACHE", cache)], ldconfig: String::new() }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    fn set(&mut self, name: &'static str, path: &str) {
        self.vars.push((name, self.path(path).into()));
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Returns a complete tree of NCCL 2.`minor`.0.
    fn nccl(&self, root: &str, minor: u32) -> PathBuf {
        self.file(&format!("{root}/lib/libnccl.so.2"), "");
        self.file(&format!("{root}/lib/libnccl_device.bc"), "");
        let header =
            format!("#define NCCL_MAJOR 2\n#define NCCL_MINOR {minor}\n#define NCCL_PATCH 0\n");
        self.file(&format!("{root}/include/nccl.h"), &header);
        let path = self.path(root);
        if root.contains("/wheels/") {
            record(path.ancestors().nth(2).unwrap());
        }
        path
    }

    fn env(&self) -> Env {
        let vars = self.vars.clone();
        let site = self.path("site");
        let ldconfig = self.ldconfig.clone();
        Env {
            var: Box::new(move |name| Some(vars.iter().find(|(key, _)| *key == name)?.1.clone())),
            python_path: Box::new(move || vec![site.clone()]),
            ldconfig: Box::new(move || ldconfig.clone()),
            prefixes: vec![self.path("usr")],
            version_of: Box::new(|_| Err("these tests run no program".to_owned())),
            ..Env::empty()
        }
    }

    fn find(&self, explicit: Option<&Path>, part: NcclPart) -> Result<NcclTree, NotFound> {
        find_nccl_in(&self.env(), explicit, part, |_| Ok(()))
    }
}

#[test]
fn the_order_of_the_search_is_as_documented() {
    let mut system = FakeSystem::new();
    system.set("DEVCOMM_NCCL_HOME", "devcomm_home");
    system.set("NCCL_HOME", "home");
    system.set("VIRTUAL_ENV", "venv");
    system.set("LD_LIBRARY_PATH", "loader/lib");
    let explicit = system.path("explicit");
    let places = [
        ("explicit", FoundBy::Explicit),
        ("devcomm_home", FoundBy::DevcommNcclHome),
        ("home", FoundBy::NcclHome),
        ("venv/lib/python3.12/site-packages/nvidia/nccl", FoundBy::SitePackages),
        ("site/nvidia/nccl", FoundBy::SitePackages),
        ("cache/wheels/nvidia-nccl-cu13-2.32.3/nvidia/nccl", FoundBy::Cache),
        ("cache/wheels/nvidia-nccl-cu13-2.9.1/nvidia/nccl", FoundBy::Cache),
        ("loader", FoundBy::System),
        ("usr", FoundBy::System),
    ];
    for (place, _) in places {
        system.nccl(place, 32);
    }
    for (place, found_by) in places {
        let tree = system.find(Some(&explicit), NcclPart::Bitcode).unwrap();
        assert_eq!((tree.root, tree.found_by), (system.path(place), found_by));
        fs::remove_dir_all(system.path(place)).unwrap();
    }
    system.find(Some(&explicit), NcclPart::Bitcode).unwrap_err();
}

#[test]
fn all_parts_of_a_tree_come_from_one_place() {
    let mut system = FakeSystem::new();
    system.set("DEVCOMM_NCCL_HOME", "home");
    let root = system.nccl("home", 32);
    let tree = system.find(None, NcclPart::Library).unwrap();
    assert_eq!(tree.library.unwrap(), root.join("lib/libnccl.so.2"));
    assert_eq!(tree.bitcode.unwrap(), root.join("lib/libnccl_device.bc"));
    assert_eq!(tree.include.unwrap(), root.join("include"));
    assert_eq!(tree.version, Some(NcclVersion { major: 2, minor: 32, patch: 0 }));
}

#[test]
fn a_tree_without_the_wanted_part_is_passed_over() {
    let mut system = FakeSystem::new();
    system.set("DEVCOMM_NCCL_HOME", "home");
    system.file("home/lib/libnccl.so.2", "");
    let cached = system.nccl("cache/wheels/nvidia-nccl-cu13-2.32.3/nvidia/nccl", 32);
    assert_eq!(system.find(None, NcclPart::Library).unwrap().root, system.path("home"));
    assert_eq!(system.find(None, NcclPart::Bitcode).unwrap().root, cached);
    assert_eq!(system.find(None, NcclPart::Headers).unwrap().root, cached);
}

#[test]
fn a_cached_tree_whose_file_was_cut_is_refused_for_every_part() {
    let system = FakeSystem::new();
    let wheel = "cache/wheels/nvidia-nccl-cu13-2.32.3";
    let root = system.nccl(&format!("{wheel}/nvidia/nccl"), 32);
    fs::write(root.join("lib/libnccl.so.2"), "a library").unwrap();
    record(&system.path(wheel));
    assert_eq!(system.find(None, NcclPart::Library).unwrap().root, root);
    fs::write(root.join("lib/libnccl.so.2"), "a lib").unwrap();
    for part in [NcclPart::Library, NcclPart::Bitcode, NcclPart::Headers] {
        let error = system.find(None, part).unwrap_err().to_string();
        assert!(error.contains("libnccl.so.2 has 5 of 9 bytes: it was cut"), "{error}");
    }
}

#[test]
fn a_refused_tree_is_skipped_with_the_callers_reason() {
    let mut system = FakeSystem::new();
    system.set("NCCL_HOME", "old");
    system.nccl("old", 27);
    let refuse = |tree: &NcclTree| match tree.version {
        Some(version) if version.minor < 28 => Err(format!("it is NCCL {version}, needed is 2.28")),
        _ => Ok(()),
    };
    let error = find_nccl_in(&system.env(), None, NcclPart::Library, refuse).unwrap_err();
    assert!(error.to_string().contains("it is NCCL 2.27.0, needed is 2.28"), "{error}");
    let wheel = system.nccl("site/nvidia/nccl", 32);
    let tree = find_nccl_in(&system.env(), None, NcclPart::Library, refuse).unwrap();
    assert_eq!(tree.root, wheel);
}

#[test]
fn not_found_lists_every_place_and_what_to_do() {
    let mut system = FakeSystem::new();
    system.set("DEVCOMM_NCCL_HOME", "nowhere");
    system.file("site/nvidia/nccl/include/nccl.h", "");
    fs::create_dir_all(system.path("usr")).unwrap();
    let explicit = system.path("also-nowhere");
    let error = system.find(Some(&explicit), NcclPart::Bitcode).unwrap_err();
    let text = error.to_string();
    let lines = [
        format!("{} (the given path): there is no such folder", explicit.display()),
        format!(
            "{} (DEVCOMM_NCCL_HOME): there is no such folder",
            system.path("nowhere").display()
        ),
        "NCCL_HOME: not set".to_owned(),
        format!(
            "{} (Python's site-packages): it has no lib/libnccl_device.bc",
            system.path("site/nvidia/nccl").display()
        ),
        format!(
            "{} (devcomm's cache): it holds no nvidia-nccl wheel",
            system.path("cache/wheels").display()
        ),
        format!("{} (the system): it has no lib/libnccl_device.bc", system.path("usr").display()),
        "what to do: run `devcomm setup`".to_owned(),
    ];
    for line in lines {
        assert!(text.contains(&line), "{line:?} is not in:\n{text}");
    }
    assert_eq!(error.tried().len(), 6);
    assert!(error.what().contains("libnccl_device.bc"));
}

#[test]
fn the_loaders_list_leads_to_the_tree_around_the_library() {
    let mut system = FakeSystem::new();
    system.file("opt/lib/x86_64-linux-gnu/libnccl.so.2", "");
    system.file(
        "opt/include/nccl.h",
        "#define NCCL_MAJOR 2\n#define NCCL_MINOR 29\n#define NCCL_PATCH 2\n",
    );
    let library = system.path("opt/lib/x86_64-linux-gnu/libnccl.so.2");
    system.ldconfig = format!(
        "2 libs found in cache\n\tlibncurses.so.6 (libc6,x86-64) => /lib/libncurses.so.6\n\
         \tlibnccl.so.2 (libc6,x86-64) => {}\n",
        library.display()
    );
    let tree = system.find(None, NcclPart::Library).unwrap();
    assert_eq!(tree.root, system.path("opt"));
    assert_eq!(tree.library.unwrap(), library);
    assert_eq!(tree.version, Some(NcclVersion { major: 2, minor: 29, patch: 2 }));
}

#[test]
fn a_path_may_name_the_folder_of_the_library_itself() {
    let system = FakeSystem::new();
    system.file("build/libnccl.so.2", "");
    let tree = system.find(Some(&system.path("build")), NcclPart::Library).unwrap();
    assert_eq!(tree.library.unwrap(), system.path("build/libnccl.so.2"));
    assert_eq!(tree.version, None);
}
