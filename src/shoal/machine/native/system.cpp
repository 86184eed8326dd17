// What the operating system charges: wake-ups, faults, processes, copies, files, sockets.
// Source: McVoy and Staelin, lmbench, 1996.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
}

struct Pair {
  alignas(128) int ball;
  alignas(128) int cpu;
  int rounds, sleeps;
};

static void hand_over(Pair *p, int to) {
  __atomic_store_n(&p->ball, to, __ATOMIC_RELEASE);
  if (p->sleeps) syscall(SYS_futex, &p->ball, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
}

static void wait_for(Pair *p, int mine) {
  while (__atomic_load_n(&p->ball, __ATOMIC_ACQUIRE) != mine)
    if (p->sleeps) syscall(SYS_futex, &p->ball, FUTEX_WAIT_PRIVATE, 1 - mine, 0, 0, 0);
}

static void *other_side(void *argument) {
  Pair *p = (Pair *)argument;
  pin(p->cpu);
  for (int i = 0; i < p->rounds; i++) { wait_for(p, 1); hand_over(p, 0); }
  return 0;
}

struct Here { Pair *pair; int cpu; double seconds; };

static void *this_side(void *argument) {
  Here *h = (Here *)argument;
  pin(h->cpu);
  int warm = h->pair->rounds / 10;
  double begin = 0;
  for (int i = 0; i < h->pair->rounds; i++) {
    if (i == warm) begin = now();
    hand_over(h->pair, 1);
    wait_for(h->pair, 0);
  }
  h->seconds = (now() - begin) / (h->pair->rounds - warm);
  return 0;
}

extern "C" {

// Seconds one way between two cores; sleeps: the receiver sleeps in the kernel.
double system_ping_pong(int cpu_a, int cpu_b, int rounds, int sleeps) {
  Pair pair = {0, cpu_b, rounds, sleeps};
  Here here = {&pair, cpu_a, 0};
  pthread_t a, b;
  if (pthread_create(&b, 0, other_side, &pair)) return -1;
  if (pthread_create(&a, 0, this_side, &here)) {
    pthread_cancel(b);
    return -1;
  }
  pthread_join(a, 0);
  pthread_join(b, 0);
  return here.seconds / 2;
}

// Seconds per first touch of a small page.
double system_page_fault(int pages) {
  uint64_t size = (uint64_t)pages * 4096;
  char *base = (char *)mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return -1;
  madvise(base, size, MADV_NOHUGEPAGE);
  double begin = now();
  for (uint64_t i = 0; i < size; i += 4096) *(volatile char *)(base + i) = 1;
  double seconds = (now() - begin) / pages;
  munmap(base, size);
  return seconds;
}

// Seconds to start a program and wait for its end.
double system_launch(const char *program, int times) {
  char *arguments[] = {(char *)program, 0};
  double begin = now();
  for (int i = 0; i < times; i++) {
    pid_t child;
    int status;
    if (posix_spawn(&child, program, 0, 0, arguments, environ)) return -1;
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  }
  return (now() - begin) / times;
}

// byte/s copied by the C library (bytes counted once).
double system_memcpy(uint64_t bytes, int times) {
  char *a = (char *)malloc(bytes), *b = (char *)malloc(bytes);
  if (!a || !b) { free(a); free(b); return -1; }
  memset(a, 1, bytes);
  memset(b, 2, bytes);
  memcpy(a, b, bytes);
  double begin = now();
  for (int i = 0; i < times; i++) {
    memcpy(a, b, bytes);
    asm volatile("" ::"r"(a), "r"(b) : "memory");
  }
  double rate = (double)bytes * times / (now() - begin);
  free(a);
  free(b);
  return rate;
}

// byte/s written to a new file, its fsync included; -errno on failure.
double system_write(const char *path, uint64_t bytes, uint64_t chunk) {
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd < 0) return -errno;
  char *buffer = (char *)malloc(chunk);
  if (!buffer) { close(fd); return -ENOMEM; }
  for (uint64_t i = 0; i < chunk; i++) buffer[i] = (char)(i * 2654435761u >> 13);
  double begin = now();
  uint64_t done = 0;
  while (done < bytes) {
    ssize_t n = write(fd, buffer, chunk);
    if (n <= 0) { int e = errno; close(fd); free(buffer); return -e; }
    done += n;
  }
  if (fsync(fd)) { int e = errno; close(fd); free(buffer); return -e; }
  double rate = done / (now() - begin);
  close(fd);
  free(buffer);
  return rate;
}

// Seconds of one small write that is made durable; -errno on failure.
double system_fsync(const char *path, int times) {
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd < 0) return -errno;
  char block[4096] = {1};
  double begin = now();
  for (int i = 0; i < times; i++)
    if (pwrite(fd, block, sizeof block, 0) != sizeof block || fsync(fd)) {
      int e = errno;
      close(fd);
      return -e;
    }
  double seconds = (now() - begin) / times;
  close(fd);
  return seconds;
}

// byte/s read from a file; cold: its cached pages are dropped first. -errno on failure.
double system_read(const char *path, uint64_t chunk, int cold) {
  int fd = open(path, O_RDONLY);
  if (fd < 0) return -errno;
  if (cold) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  char *buffer = (char *)malloc(chunk);
  if (!buffer) { close(fd); return -ENOMEM; }
  memset(buffer, 1, chunk);
  double begin = now();
  uint64_t done = 0;
  for (;;) {
    ssize_t n = read(fd, buffer, chunk);
    if (n < 0) { int e = errno; close(fd); free(buffer); return -e; }
    if (n == 0) break;
    done += n;
  }
  double rate = done / (now() - begin);
  close(fd);
  free(buffer);
  return rate;
}

static int all(int fd, char *data, uint64_t bytes, int sends) {
  while (bytes) {
    ssize_t n = sends ? send(fd, data, bytes, MSG_NOSIGNAL) : recv(fd, data, bytes, 0);
    if (n <= 0) return -1;
    data += n;
    bytes -= n;
  }
  return 0;
}

// TCP between two processes of this host. Fills trips[repeats] with seconds of one
// round trip (mean of `rounds`), rates[repeats] with byte/s one way. 0, or -errno.
int system_loopback(uint64_t message, int rounds, uint64_t bulk, int repeats, double *trips,
                    double *rates) {
  int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  if (listener < 0) return -errno;
  sockaddr_in address;
  memset(&address, 0, sizeof address);
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  timeval patience = {20, 0};
  if (bind(listener, (sockaddr *)&address, length) || listen(listener, 1) ||
      getsockname(listener, (sockaddr *)&address, &length)) {
    int e = errno;
    close(listener);
    return -e;
  }
  uint64_t chunk = 1 << 20, space = message > chunk ? message : chunk;
  char *buffer = (char *)malloc(space);
  if (!buffer) { close(listener); return -ENOMEM; }
  memset(buffer, 1, space);
  pid_t child = fork();
  if (child < 0) { int e = errno; close(listener); free(buffer); return -e; }
  if (child == 0) {  // only system calls from here on
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(fd, (sockaddr *)&address, length)) _exit(1);
    for (int r = 0; r < repeats; r++) {
      for (int i = 0; i < rounds; i++)
        if (all(fd, buffer, message, 0) || all(fd, buffer, message, 1)) _exit(1);
      for (uint64_t done = 0; done < bulk; done += chunk)
        if (all(fd, buffer, chunk, 0)) _exit(1);
      if (all(fd, buffer, 1, 1)) _exit(1);
    }
    _exit(0);
  }
  setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  int fd = accept(listener, 0, 0), result = fd < 0 ? -errno : 0;
  if (fd >= 0) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    for (int r = 0; r < repeats && !result; r++) {
      double begin = now();
      for (int i = 0; i < rounds && !result; i++)
        if (all(fd, buffer, message, 1) || all(fd, buffer, message, 0)) result = -EPIPE;
      trips[r] = (now() - begin) / rounds;
      begin = now();
      uint64_t done = 0;
      for (; done < bulk && !result; done += chunk)
        if (all(fd, buffer, chunk, 1)) result = -EPIPE;
      if (!result && all(fd, buffer, 1, 0)) result = -EPIPE;
      rates[r] = done / (now() - begin);
    }
    close(fd);
  }
  close(listener);
  free(buffer);
  if (result) kill(child, SIGKILL);
  int status;
  waitpid(child, &status, 0);
  return result;
}
}
