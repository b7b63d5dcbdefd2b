//! A short run under valgrind: no invalid access, no definite leak. Reader threads, since valgrind knows no io_uring, and
//! the scalar and AVX2 kernels, since it knows no AVX-512. Where valgrind is not installed, a line says so.
#![allow(clippy::unwrap_used)]

#[path = "common/engines.rs"]
mod engines;
#[path = "common/program.rs"]
mod program;

use std::process::Command;

use engines::Model;
use millstream::kernels::{Isa, Kernels};

#[test]
fn a_short_run_is_clean() {
    if !Command::new("valgrind").arg("--version").output().is_ok_and(|o| o.status.success()) {
        println!("valgrind is not installed: nothing is checked");
        return;
    }
    // Smaller than the model's experts, so that slabs are reused.
    let plain = (Model::Tiny, Isa::Scalar, "direct", "absorbed");
    let integer = (Model::TinyInt4, Isa::Scalar, "buffered", "explicit");
    let vector = (Model::TinyInt4Groups, Isa::Avx2, "buffered", "absorbed");
    for (model, isa, io, attention) in [plain, integer, vector] {
        let io = if io == "direct" && !engines::has(millstream_io::IoMode::Direct) { "buffered" } else { io };
        if Kernels::for_isa(isa).is_none() {
            println!("this machine has no {isa}");
            continue;
        }
        let ids: Vec<String> = model.prompt(20).iter().map(u32::to_string).collect();
        let ram = program::ram_besides_program(4, &model.dir());
        let output = Command::new("valgrind")
            .args(["--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite"])
            .args(["--show-leak-kinds=definite", "--fair-sched=yes"])
            .arg(env!("CARGO_BIN_EXE_millstream"))
            .args(["run", "--quiet", "--ids", "--temp", "0", "-n", "5", "-t", "2", "--ram", &ram])
            .args(["--device", "threads", "--io", io, "--attention", attention, "--kernels", isa.name()])
            .args(["-p", &ids.join(","), "-m"])
            .arg(model.dir())
            .output()
            .unwrap();
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{model:?} {isa}: {}\n{stderr}", output.status);
        assert_eq!(stdout.split([',', ' ', '\n']).filter(|id| id.parse::<u32>().is_ok()).count(), 5, "{stdout}");
    }
}
