//! A process that starts another while it reads: neither notices the other.
#![allow(unsafe_code, reason = "a child is held up between fork and exec")]
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod common;

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Kind, Model, check_bytes, demand, kinds, open, plan_of, span};
use millstream_io::{DeviceConfig, SlabPool, Wait};

const MIB: u64 = 1 << 20;
const READS: u64 = 24;

#[test]
fn a_child_started_in_the_middle_of_reads_has_no_descriptor_of_theirs_and_costs_no_byte() {
    for kind in kinds() {
        let model = Model::new(&[8 * MIB]);
        let (files, pool) = (model.open(kind.mode()), SlabPool::new(MIB as usize, READS as usize).unwrap());
        let mut device = open(kind, &DeviceConfig::default(), &files, &pool);
        let spans: Vec<_> = (0..READS).map(|i| [span(0, i * 300_007, 900_000 + i)]).collect();
        let plans: Vec<_> = spans.iter().map(|spans| plan_of(&files, spans)).collect();
        let submit = |device: &mut dyn millstream_io::Device, reads: std::ops::Range<u64>| {
            for tag in reads {
                device.submit(demand(tag, &plans[tag as usize]), pool.take().unwrap()).unwrap();
            }
        };
        submit(&mut *device, 0..READS / 2);
        let mut child = Command::new("ls");
        child.args(["-l", "/proc/self/fd/"]).stdout(Stdio::piped());
        // SAFETY: the closure only sleeps, between fork and exec.
        unsafe {
            // The child shares the memory of the slabs for a while, which is then written to.
            child.pre_exec(|| {
                std::thread::sleep(Duration::from_millis(20));
                Ok(())
            });
        }
        let child = std::thread::spawn(move || child.output().unwrap());
        submit(&mut *device, READS / 2..READS);
        for _ in 0..READS {
            let read = device.reap(Wait::Block).unwrap().unwrap();
            assert_eq!(read.result, Ok(()), "{kind:?}");
            let tag = read.tag as usize;
            check_bytes(&plans[tag], &spans[tag], read.slab.bytes(), "mid-read");
        }
        let output = child.join().unwrap();
        let listed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && listed.contains("0 -> "), "{listed}");
        let theirs = [&*model.dir.path().to_string_lossy(), "io_uring", "eventfd"];
        assert!(!theirs.iter().any(|what| listed.contains(what)), "{kind:?}: {listed}");
        assert!(kind == Kind::Map || device.stats().bytes > 0);
    }
}
